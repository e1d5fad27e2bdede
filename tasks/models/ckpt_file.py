"""A checkpoint of MindSpore (`*.ckpt`) as weights: where its tensors lie, under their Hugging Face names.

The file is a protobuf message, and only its frame is read here, field by field, so that planning needs neither
MindSpore nor the gigabytes between; nothing in it is executed. Any number of values follow each other:

    Checkpoint  1: Value                                 Value   1: name, 2: TensorProto
    TensorProto 1: a dimension, 2: type, 3: bytes        a tensor above 512 MiB comes in parts, one value after another

After the last value a file may end with the text `crc_num` and 10 bytes. Encrypted files and maps are not read.

Names are those of Hugging Face (MindNLP, and this project), or those that MindFormers gives its Llama and the models
that share its code. The rows of queries and keys are taken to stand as in Hugging Face checkpoints. MindFormers of 2023
brought them into Meta's order (`permute_inv` in its conversion) under the same names; no file says which it is.

Source: mindspore/train/checkpoint_pb2.py and serialization.py of MindSpore 2.7.0; name_replace in
mindformers/models/llama/convert_weight.py of MindFormers, 2024.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError
from tasks.models.headers import ITEM_BYTES, STORED_AS, TensorHeader

# MindSpore's names of the types that weights may have; others are told by their own.
_TYPES = {"Float32": "F32", "Float16": "F16", "BFloat16": "BF16"}

_NAMES = {
    "tok_embeddings.embedding_weight": "embed_tokens.weight",
    "embed_tokens.embedding_table": "embed_tokens.weight",  # older versions of MindNLP
    "norm_out.weight": "norm.weight",
}
_BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")

_VARINT, _BYTES = 0, 2  # protobuf's wire types
_CRC = b"crc_num"
_CRC_BYTES = len(_CRC) + 10
_LONGEST_TEXT = 4096  # of a name or a type


@dataclass(frozen=True)
class CkptHeader(TensorHeader):
    """Where one tensor lies in a .ckpt file.

    Args:
        parts: place and length of its bytes, in order.
    """

    parts: tuple[tuple[int, int], ...] = ()


def ckpt_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file by their Hugging Face names.

    Raises:
        InputError: it is no whole checkpoint of MindSpore, or two of its tensors have the same name.
    """
    headers: dict[str, TensorHeader] = {}
    with path.open("rb") as file:
        reader = _Reader(path, file)
        for original, dtype, shape, parts in _tensors(reader):
            name = hugging_face_name(original)
            if name in headers:
                raise reader.damaged(f"the tensor {original} stands twice")
            size, item = sum(length for _, length in parts), ITEM_BYTES.get(_TYPES.get(dtype, ""))
            if item is not None and size != prod(shape) * item:
                raise reader.damaged(f"the tensor {original} {shape} of type {dtype} has {size} bytes")
            headers[name] = CkptHeader(path, _TYPES.get(dtype, dtype), shape, parts[0][0], parts)
    return headers


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a tensor; an unknown name stays as it is."""
    block = _BLOCK.fullmatch(name)
    if block:
        index, part, kind = block.groups()
        return f"model.layers.{index}.{_BLOCK_NAMES.get(part, part)}.{kind}"
    known = _NAMES.get(name.removeprefix("model."))
    return name if known is None else f"model.{known}"


def read_ckpt_tensor(header: TensorHeader) -> NDArray[np.generic]:
    """One tensor: float32, float16, or bfloat16 as its bits (uint16).

    Raises:
        InputError: it is of another type.
    """
    assert isinstance(header, CkptHeader)
    if header.dtype not in STORED_AS:
        problem = f"it holds tensors of type {header.dtype}; supported: {', '.join(_TYPES)}"
        raise InputError("model.weights_unreadable", path=header.path, problem=problem)
    values = np.empty(header.shape, STORED_AS[header.dtype])
    room, filled = values.reshape(-1).view(np.uint8).data, 0
    with header.path.open("rb") as file:
        for place, length in header.parts:
            file.seek(place)
            file.readinto(room[filled : filled + length])
            filled += length
    return values


def _tensors(reader: "_Reader") -> Iterator[tuple[str, str, tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Name, type, shape and parts of each tensor."""
    tensor: tuple[str, str, tuple[int, ...]] | None = None
    parts: list[tuple[int, int]] = []
    for name, dtype, shape, place, length in _values(reader):
        if tensor is not None and tensor != (name, dtype, shape):
            yield *tensor, tuple(parts)
            parts = []
        tensor = (name, dtype, shape)
        parts.append((place, length))
    if tensor is None:
        raise reader.damaged("it holds no tensor")
    yield *tensor, tuple(parts)


def _values(reader: "_Reader") -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Name, type, shape, place and length of each value of the file."""
    while not reader.at_end():
        end = reader.enter(1)
        name, tensor_end = None, None
        while reader.place < end:
            field, inner_end = reader.field(end)
            if field == 1:
                name = reader.text(inner_end)
            elif field == 2:
                tensor_end = inner_end
                break
            else:
                raise reader.damaged("it holds something else than tensors")
        if name is None or tensor_end != end:
            raise reader.damaged("it holds a tensor without a name or without values")
        yield name, *_tensor(reader, end)


def _tensor(reader: "_Reader", end: int) -> tuple[str, tuple[int, ...], int, int]:
    shape: list[int] = []
    dtype, content = "", (0, 0)
    while reader.place < end:
        field, inner_end = reader.field(end)
        if field == 1 and inner_end is None:
            shape.append(reader.varint())
        elif field == 2:
            dtype = reader.text(inner_end)
        elif field == 3 and inner_end is not None:
            content = (reader.place, inner_end - reader.place)
            reader.skip_to(inner_end)
        else:
            raise reader.damaged("it holds something else than tensors")
    return dtype, () if shape == [0] else tuple(shape), *content  # a single number is saved with the dimension 0


class _Reader:
    """Reads a protobuf message part by part, each held against the end of what it stands in."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size
        self.place = 0

    def at_end(self) -> bool:
        """Whether nothing follows, or the checksum only."""
        left = self._size - self.place
        if left == _CRC_BYTES:
            checksum = self._file.read(len(_CRC)) == _CRC
            self.skip_to(self.place)
            return checksum
        return left == 0

    def enter(self, wanted: int) -> int:
        """The end of a part that must be the field of a number."""
        field, end = self.field(self._size)
        if field != wanted or end is None:
            raise self.damaged("it is not a checkpoint of MindSpore, or it is encrypted")
        return end

    def field(self, limit: int) -> tuple[int, int | None]:
        """Number of the next field, and where it ends; None: it is a number."""
        key = self.varint()
        if key & 7 == _VARINT:
            return key >> 3, None
        if key & 7 != _BYTES:
            raise self.damaged("it is not a checkpoint of MindSpore, or it is encrypted")
        length = self.varint()
        if self.place + length > limit:
            raise self.damaged(f"it is cut short: a part at byte {self.place} has {length} bytes")
        return key >> 3, self.place + length

    def text(self, end: int | None) -> str:
        length = -1 if end is None else end - self.place
        if not 0 <= length <= _LONGEST_TEXT:
            raise self.damaged(f"there is no text at byte {self.place}")
        raw = self._file.read(length)
        self.place += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {self.place - length} is not UTF-8") from error

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self._file.read(1)
            if not byte:
                raise self.damaged(f"it is cut short at byte {self.place}")
            self.place += 1
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return value
        raise self.damaged(f"there is no number at byte {self.place}")

    def skip_to(self, place: int) -> None:
        self._file.seek(place)
        self.place = place

    def damaged(self, problem: str) -> InputError:
        """The error for a file that is not what it should be."""
        return InputError("model.weights_unreadable", path=self._path, problem=problem)
