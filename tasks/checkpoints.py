"""Checkpoints of an unfinished training: one file each, whole or absent, newest kept.

A checkpoint holds all that makes the continued run equal to an undisturbed one: weights and optimizer state now and at
the best validation, and the progress so far. Knows nothing of MindSpore: tensors are NumPy arrays by name.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from schemas.errors import StageError
from schemas.manifest import Frozen
from schemas.reports import CurvePoint, ValidationPoint
from tasks.files import write_atomically

logger = logging.getLogger("mindtune.checkpoints")

Tensors = dict[str, npt.NDArray[Any]]

FORMAT_VERSION = "1"


class Progress(Frozen):
    """How far a training has come; step 0 is before the first update."""

    step: int = 0
    curve: tuple[CurvePoint, ...] = ()
    skipped: tuple[int, ...] = ()
    validation: tuple[ValidationPoint, ...] = ()
    best_step: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A training at one step.

    Args:
        progress: step and curves.
        now: weights and optimizer state after that step, by name.
        best: the same at the best validation so far; empty before the first one.
    """

    progress: Progress
    now: Tensors
    best: Tensors


class Checkpoints:
    """The checkpoints of one training in a folder of their own.

    Args:
        folder: made where it is missing; leftovers of an interrupted write are removed.
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint under its step's name, then remove the oldest beyond `keep`."""
        tensors = _prefixed("now", checkpoint.now) | _prefixed("best", checkpoint.best)
        progress = checkpoint.progress.model_dump_json()
        metadata = {"version": FORMAT_VERSION, "progress": progress, "sha256": _digest(progress, tensors)}
        path = self.folder / f"step-{checkpoint.progress.step:08d}.safetensors"
        write_atomically(path, save(tensors, metadata))
        for old in self._paths()[self.keep :]:
            old.unlink()
        return path

    def newest(self, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint | None:
        """The newest checkpoint that is whole and fits; those that can't be used are passed over with a logged reason.

        Args:
            shapes: of each tensor that the training has.
        """
        for path in self._paths():
            try:
                return _read(path, shapes)
            except StageError as error:
                logger.warning("%s", error.message)
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)


def _read(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Read one checkpoint and hold it against its digest and the shapes wanted.

    Raises:
        StageError: it is damaged, of another format version, or holds other tensors.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if metadata.get("version") != FORMAT_VERSION:
            raise _unusable(path, f"its format version is {metadata.get('version')}, not {FORMAT_VERSION}")
        if metadata["sha256"] != _digest(metadata["progress"], tensors):
            raise _unusable(path, "its content does not match its digest")
        progress = Progress.model_validate_json(metadata["progress"])
    except (SafetensorError, OSError, KeyError, ValidationError) as error:
        raise _unusable(path, str(error)) from error
    now, best = dict(_part("now", tensors)), dict(_part("best", tensors))
    for part in (now, best) if progress.best_step is not None else (now,):
        if {name: array.shape for name, array in part.items()} != dict(shapes):
            raise _unusable(path, "it holds other tensors than this training has")
    return Checkpoint(progress, now, best)


def _unusable(path: Path, problem: str) -> StageError:
    return StageError("train.checkpoint", stage="train", path=path, problem=problem)


def _prefixed(part: str, tensors: Tensors) -> Tensors:
    return {f"{part}/{name}": np.asarray(array, order="C") for name, array in tensors.items()}


def _part(part: str, tensors: Tensors) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    start = f"{part}/"
    return ((name.removeprefix(start), array) for name, array in tensors.items() if name.startswith(start))


def _digest(progress: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(progress.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
