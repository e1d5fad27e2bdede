"""The sum of base weights and adapter, tensor by tensor: W + scale * B A. No MindSpore."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError, StageError
from tasks.models.adapter import Adapter
from tasks.models.headers import read_headers
from tasks.models.saving import DTYPES, stored_tensor
from tasks.models.spec import DecoderSpec, expected_shapes, linear_layers


def check_adapter(adapter: Adapter, spec: DecoderSpec, path: Path) -> None:
    """Refuse an adapter that can't be added to a model.

    Args:
        adapter: the adapter.
        spec: the sizes of the base model.
        path: where the adapter lies, for the message.
    Raises:
        InputError: the adapter names layers that the model does not have, or has other sizes than they.
        StageError: it holds NaN or infinity.
    """
    layers, shapes = linear_layers(spec), expected_shapes(spec)
    unknown = [name for name in adapter.layers if name not in layers]
    if unknown:
        problem = f"the model has no linear layer {', '.join(unknown)}"
        raise InputError("lora.unusable", stage="merge", path=path, problem=problem)
    for name, (a, b) in adapter.layers.items():
        if (b.shape[0], a.shape[1]) != shapes[f"{name}.weight"]:
            problem = f"{name} is {shapes[f'{name}.weight']} in the model, but {b.shape} x {a.shape} in the adapter"
            raise InputError("lora.unusable", stage="merge", path=path, problem=problem)
    broken = [name for name, pair in adapter.layers.items() if not all(np.isfinite(part).all() for part in pair)]
    if broken:
        raise StageError("merge.not_finite", stage="merge", names=", ".join(broken))


def base_tensors(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Tensors of a checkpoint, one at a time, in the type that they are stored in.

    Raises:
        InputError: a file is damaged.
    """
    headers = read_headers(folder)
    for name in names:
        yield name, stored_tensor(headers[name])


def merged_tensors(
    base: Iterable[tuple[str, NDArray[np.generic]]], adapter: Adapter, dtype: str
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The tensors of the merged model, in the order of the base model's, one at a time.

    A tensor without update keeps its bits where it is of the type already. An updated one is summed in float64 and
    rounded once, so that the result does not hang on how a machine's float32 product sums up.

    Args:
        base: name and values of the base model's tensors.
        adapter: checked by `check_adapter`.
        dtype: type of the result: float32, float16 or bfloat16.
    Raises:
        StageError: a value is beyond the range of the type.
    """
    updates = {f"{layer}.weight": pair for layer, pair in adapter.layers.items()}
    for name, tensor in base:
        total = tensor
        if name in updates:
            a, b = (part.astype(np.float64) for part in updates[name])
            total = tensor.astype(np.float64) + adapter.scale * (b @ a)  # (out, in)
        with np.errstate(over="ignore"):  # told by name below
            merged = total.astype(DTYPES[dtype], copy=False)
        if merged is not tensor and not np.isfinite(merged).all():
            raise StageError("merge.overflow", stage="merge", names=name, dtype=dtype)
        yield name, merged
