"""A LoRA adapter as data and as files, in the form that PEFT reads and writes. No MindSpore.

    adapter_config.json        rank, alpha, dropout, target modules, in PEFT's words
    adapter_model.safetensors  base_model.model.<layer>.lora_A.weight (R, in) and .lora_B.weight (out, R), float32
    mindtune.json              digest of the base model and end token that it was trained with; PEFT passes it over

Source of the form: PEFT 0.17.1, LoraConfig and save_pretrained.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError
from tasks.files import write_atomically
from tasks.models.headers import read_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ORIGIN_FILE = "mindtune.json"
ORIGIN_VERSION = 1

Layers = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")

# What PEFT can do beyond plain LoRA on linear layers, with the values under which it does not.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "megatron_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}


@dataclass(frozen=True)
class Adapter:
    """A low-rank update for some layers of a model: W + scale * B A.

    Args:
        rank: R.
        alpha: numerator of the scale.
        dropout: share of the inputs that was set to zero in training; no effect afterwards.
        target_modules: the names that the layers were chosen by.
        layers: by full layer name the pair a (R, in), b (out, R), float32.
        base_digest: the base model that it was trained on; None: it came without.
        use_rslora: the scale is alpha / sqrt(R) instead of alpha / R (Kalajdzievski 2023, arXiv 2312.03732).
        end_token: id of the token that it was trained to end its answers with; None: not known.
    """

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...]
    layers: Layers
    base_digest: str | None = None
    use_rslora: bool = False
    end_token: int | None = None

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return float(self.alpha / (self.rank**0.5 if self.use_rslora else self.rank))


def tensor_names(layer: str) -> tuple[str, str]:
    """PEFT's names of the pair (a, b) of a layer."""
    return tuple(f"base_model.model.{layer}.lora_{half}.weight" for half in "AB")  # type: ignore[return-value]


def layers_of(tensors: Mapping[str, NDArray[np.float32]]) -> Layers:
    """The pairs (a, b) by layer, in the order of the tensors; the inverse of writing them under `tensor_names`.

    Raises:
        ValueError: a name is not one of PEFT's, or half of a pair is missing.
    """
    halves: dict[str, dict[str, NDArray[np.float32]]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is not the name of a LoRA weight")
        halves.setdefault(match["layer"], {})[match["half"]] = tensor
    for layer, pair in halves.items():
        if len(pair) != 2:
            raise ValueError(f"{layer} has only lora_{next(iter(pair))}")
    return {layer: (pair["A"], pair["B"]) for layer, pair in halves.items()}


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter into an existing folder; the same adapter gives the same bytes.

    Raises:
        OSError: no space, no permission.
    """
    from safetensors.numpy import save

    tensors = {
        name: np.ascontiguousarray(part, dtype=np.float32)
        for layer, pair in adapter.layers.items()
        for name, part in zip(tensor_names(layer), pair, strict=True)
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(adapter.target_modules),
        "use_rslora": adapter.use_rslora,
        "bias": "none",
        "inference_mode": True,
    }
    write_atomically(folder / WEIGHTS_FILE, save(tensors))
    write_atomically(folder / CONFIG_FILE, _document(config))
    if adapter.base_digest is not None:
        origin = {
            "format_version": ORIGIN_VERSION,
            "base_digest": adapter.base_digest,
            "end_token": adapter.end_token,
        }
        write_atomically(folder / ORIGIN_FILE, _document(origin))


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that `save_adapter` or PEFT wrote.

    Raises:
        InputError: a file is missing or damaged, the configuration asks for more than plain LoRA, or the weights don't
            fit it.
    """
    config = _read_document(folder, CONFIG_FILE)
    for field, plain in _PLAIN_VALUES.items():
        found = config.get(field, plain[0])
        if found not in plain:
            raise _unusable(folder, f"{CONFIG_FILE} sets {field} to {found!r}; supported: {plain[0]!r}")
    if not (folder / WEIGHTS_FILE).is_file():
        raise _unusable(folder, f"{WEIGHTS_FILE} is missing")
    try:
        targets = config["target_modules"]
        adapter = Adapter(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout", 0.0)),
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
            layers=layers_of(dict(read_file(folder / WEIGHTS_FILE))),
            use_rslora=bool(config.get("use_rslora", False)),
            **_origin(folder),
        )
    except KeyError as error:
        raise _unusable(folder, f"{CONFIG_FILE} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise (error if isinstance(error, InputError) else _unusable(folder, str(error))) from error
    _check_shapes(folder, adapter)
    return adapter


def _check_shapes(folder: Path, adapter: Adapter) -> None:
    if not adapter.layers:
        raise _unusable(folder, f"{WEIGHTS_FILE} holds no weights")
    for layer, (a, b) in adapter.layers.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != adapter.rank or b.shape[1] != adapter.rank:
            raise _unusable(folder, f"lora_A {a.shape} and lora_B {b.shape} of {layer} are not of rank {adapter.rank}")


def _origin(folder: Path) -> dict[str, Any]:
    """Base digest and end token, where the adapter was made by mindtune."""
    if not (folder / ORIGIN_FILE).is_file():
        return {}
    origin = _read_document(folder, ORIGIN_FILE)
    if origin.get("format_version") != ORIGIN_VERSION:
        problem = f"{ORIGIN_FILE} is of format version {origin.get('format_version')}, not {ORIGIN_VERSION}"
        raise _unusable(folder, problem)
    if not isinstance(origin.get("base_digest"), str):
        raise _unusable(folder, f"{ORIGIN_FILE} lacks 'base_digest'")
    end_token = origin.get("end_token")
    if end_token is not None and not isinstance(end_token, int):
        raise _unusable(folder, f"{ORIGIN_FILE} sets 'end_token' to {end_token!r}, not to a token id")
    return {"base_digest": origin["base_digest"], "end_token": end_token}


def _read_document(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _unusable(folder, f"{name} is missing") from error
    except ValueError as error:
        raise _unusable(folder, f"{name} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise _unusable(folder, f"{name} holds no JSON object")
    return document


def _document(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _unusable(folder: Path, problem: str) -> InputError:
    return InputError("lora.unusable", path=folder, problem=problem)
