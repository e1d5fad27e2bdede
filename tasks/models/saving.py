"""Weights in the type that they are stored in: written and read tensor by tensor, and the digest of what they say.

The files are those of a Hugging Face folder: `model.safetensors`, or shards beside `model.safetensors.index.json`. They
are written as a stream, so that one tensor is in memory at a time and not the model; the safetensors library can only
write what it is handed whole.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tasks.files import digest_of
from tasks.models.headers import TensorHeader, read_headers, read_stored

Shapes = Mapping[str, tuple[int, ...]]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # safetensors' names


def stored_tensor(header: TensorHeader) -> NDArray[Any]:
    """One tensor as its file has it: float32, float16 or bfloat16, bit for bit; a quantized one as float32."""
    values = read_stored(header)
    return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


class WeightsDigest:
    """SHA-256 over names, shapes, types and bytes of tensors; neither their order nor the cut into files counts."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[object]] = {}

    def add(self, name: str, tensor: NDArray[np.generic]) -> None:
        """Take in one tensor."""
        content = hashlib.sha256(_bytes(tensor)).hexdigest()
        self._tensors[name] = [str(tensor.dtype), list(tensor.shape), content]

    def hexdigest(self) -> str:
        """The digest of the tensors so far."""
        return digest_of(self._tensors)


def weights_digest(folder: Path) -> str:
    """The digest of all weights of a checkpoint folder, read tensor by tensor.

    Raises:
        InputError: there are no weights, or a file is damaged.
    """
    digest = WeightsDigest()
    for name, header in read_headers(folder).items():
        digest.add(name, stored_tensor(header))
    return digest.hexdigest()


def write_weights(
    folder: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, NDArray[np.generic]]],
    *,
    dtype: str,
    max_shard_bytes: float,
) -> str:
    """Write tensors of one type in the order of `shapes`; gives their digest (`WeightsDigest`).

    Args:
        folder: an existing folder without weights.
        shapes: name and shape of every tensor, in the order in which they come.
        tensors: name and values, already of the type.
        dtype: float32, float16 or bfloat16.
        max_shard_bytes: largest file; a single larger tensor gets a file of its own.
    Raises:
        ValueError: a tensor comes out of order, or has another shape or type than announced, is missing, or surplus.
    """
    digest = WeightsDigest()
    coming = iter(tensors)
    shards = _cut(shapes, DTYPES[dtype].itemsize, max_shard_bytes)
    files = [
        WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        with (folder / file).open("wb") as out:
            out.write(_header({name: shapes[name] for name in names}, dtype))
            for name in names:
                found, tensor = next(coming, ("no tensor", np.zeros(0)))
                if (found, tensor.shape, tensor.dtype) != (name, shapes[name], DTYPES[dtype]):
                    raise ValueError(
                        f"{name} {shapes[name]} {dtype} expected, not {found} {tensor.shape} {tensor.dtype}"
                    )
                digest.add(name, tensor)
                out.write(_bytes(tensor))
    if (surplus := next(coming, None)) is not None:
        raise ValueError(f"{surplus[0]} was not announced")
    if len(shards) > 1:
        _write_index(folder, dict(zip(files, shards, strict=True)), shapes, DTYPES[dtype].itemsize)
    return digest.hexdigest()


def _bytes(tensor: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _cut(shapes: Shapes, itemsize: int, limit: float) -> list[list[str]]:
    """Names by file: in order, each file as full as the limit allows."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(shapes: Shapes, dtype: str) -> bytes:
    """A safetensors header: its length as 8 bytes, then JSON padded with blanks to whole 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # Transformers refuses files without it
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": STORED_AS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(folder: Path, files: Mapping[str, list[str]], shapes: Shapes, itemsize: int) -> None:
    document = {
        "metadata": {"total_size": sum(math.prod(shape) * itemsize for shape in shapes.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
