"""The weights of a checkpoint, read with NumPy: which files there are, what their headers promise, and the tensors.

A checkpoint is a folder of safetensors files or of MindSpore's .ckpt files, or one GGUF file (see `ckpt_file` and
`gguf_file`, imported only for such ones).

A safetensors file is 8 bytes with the length of the header (little endian), the header as JSON (name -> dtype, shape,
place of the bytes), and the bytes of all tensors without gaps. Reading it here rather than with the safetensors package
gives bfloat16, which NumPy has no type for, and headers without touching gigabytes of weights.

Source: the format's description in huggingface/safetensors, README.md, section "Format" (0.5).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # NumPy has no bfloat16: its bits
FLOATS = tuple(STORED_AS)
CKPT = ".ckpt"


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies.

    Args:
        path: the file.
        dtype: the format's name of the type, for example `BF16`, or `Q4_1` in a GGUF file.
        shape: the tensor's shape.
        offset: of its first byte, from the beginning of the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def is_gguf(base: Path) -> bool:
    """Whether a checkpoint is a GGUF file rather than a folder."""
    return base.suffix.lower() == ".gguf" and not base.is_dir()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint folder that hold its weights.

    As Transformers does, `model.safetensors` is taken first, then the files that `model.safetensors.index.json` lists
    (so that copies of the same weights under another naming are left alone), else every *.safetensors file. A folder
    without any of them is one of MindSpore: every *.ckpt file.

    Raises:
        InputError: the folder is missing, holds no weights, or its index is not readable or names a missing file.
    """
    if not folder.is_dir():
        raise InputError("model.folder_missing", path=folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        return _indexed_files(index)
    files = tuple(sorted(folder.glob("*.safetensors")) or sorted(folder.glob(f"*{CKPT}")))
    if not files:
        raise InputError("model.no_weights", path=folder)
    return files


def read_headers(base: Path) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint, folder or GGUF file, by name, from the headers of its files only.

    Raises:
        InputError: as `weight_files`; or a file is not a whole safetensors file, two files hold the same name, or the
            index promises a tensor that its file does not hold. Or as `ckpt_file.ckpt_headers` and
            `gguf_file.gguf_headers`.
    """
    if is_gguf(base):
        from tasks.models.gguf_file import gguf_headers

        return gguf_headers(base)
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(base):
        for name, header in _headers_of(path).items():
            if name in headers:
                problem = f"the tensor {name} is also in {headers[name].path.name}"
                if path.suffix == CKPT:
                    problem += "; several .ckpt files must each hold other tensors, not slices of the same ones"
                raise _unreadable(path, problem)
            headers[name] = header
    return headers


def file_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name.

    Raises:
        InputError: it is empty, cut short, longer than its header says, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _unreadable(path, f"it is cut short, with {size} bytes only")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES or length < 2:
            raise _unreadable(path, "it is not a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise _unreadable(path, f"its header is cut short, {len(text)} of {length} bytes")
    try:
        document = json.loads(text)
        entries = {name: entry for name, entry in document.items() if name != "__metadata__"}
        headers = {name: _tensor_header(path, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(path, f"its header is not that of a safetensors file ({error})") from error
    _check_places(path, headers, 8 + length, size)
    return headers


def read_tensor(header: TensorHeader) -> NDArray[np.float32]:
    """One tensor as float32; float16 and bfloat16 are widened, which loses nothing.

    Raises:
        InputError: it is of another type.
    """
    values = read_stored(header)
    if values.dtype == np.uint16:  # bfloat16 is the upper half of float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def read_stored(header: TensorHeader) -> NDArray[Any]:
    """One tensor: float32, float16, bfloat16 as its bits (uint16); a quantized one of a GGUF file as float32.

    Raises:
        InputError: it is of another type.
    """
    if is_gguf(header.path):
        from tasks.models.gguf_file import read_gguf_tensor

        return read_gguf_tensor(header)
    if header.path.suffix == CKPT:
        from tasks.models.ckpt_file import read_ckpt_tensor

        return read_ckpt_tensor(header)
    if header.dtype not in FLOATS:
        raise _unreadable(header.path, f"it holds tensors of type {header.dtype}; supported: {', '.join(FLOATS)}")
    values: NDArray[Any] = np.fromfile(header.path, STORED_AS[header.dtype], prod(header.shape), offset=header.offset)
    return values.reshape(header.shape)


def read_file(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of one safetensors file, one after the other, as float32.

    Raises:
        InputError: as `file_headers` and `read_tensor`.
    """
    for name, header in file_headers(path).items():
        yield name, read_tensor(header)


def _headers_of(path: Path) -> Mapping[str, TensorHeader]:
    if path.suffix == CKPT:
        from tasks.models.ckpt_file import ckpt_headers

        return ckpt_headers(path)
    return file_headers(path)


def _tensor_header(path: Path, entry: Mapping[str, Any], data_start: int) -> TensorHeader:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    item = ITEM_BYTES.get(entry["dtype"])
    if item is None:
        raise ValueError(f"unknown type {entry['dtype']}")
    if begin < 0 or min(shape, default=0) < 0 or end - begin != prod(shape) * item:
        raise ValueError(f"{end - begin} bytes for a tensor {shape} of {entry['dtype']}")
    return TensorHeader(path, entry["dtype"], shape, data_start + begin)


def _check_places(path: Path, headers: Mapping[str, TensorHeader], data_start: int, size: int) -> None:
    expected = data_start
    for header in sorted(headers.values(), key=lambda header: (header.offset, prod(header.shape))):
        if header.offset != expected:
            raise _unreadable(path, "its tensors overlap or leave gaps")
        expected += prod(header.shape) * ITEM_BYTES[header.dtype]
    if size != expected:
        raise _unreadable(path, f"it has {size} bytes, but its header says {expected}")


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted: dict[str, set[str]] = {}
        for tensor, name in names.items():
            wanted.setdefault(str(name), set()).add(tensor)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(index, f"it is not an index of safetensors files ({error!r})") from error
    if not wanted:
        raise _unreadable(index, "it names no tensor")
    for name in sorted(wanted):
        path = index.parent / name
        if Path(name).name != name or not path.is_file():
            raise _unreadable(index, f"it names the file {name}, which is not in the folder")
        absent = sorted(wanted[name] - file_headers(path).keys())
        if absent:
            raise _unreadable(index, f"it says that {name} holds {', '.join(absent[:3])}, which it does not")
    return tuple(index.parent / name for name in sorted(wanted))


def _unreadable(path: Path, problem: str) -> InputError:
    return InputError("model.weights_unreadable", path=path, problem=problem)
