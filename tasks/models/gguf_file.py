"""A GGUF file as a checkpoint: its metadata as config.json, its tensors under their Hugging Face names.

Tensors are read from the file when they are asked for, one at a time, and dequantized to float32 by the gguf package;
there is no second copy of the model on the disk. The header is read here rather than with that package's reader, which
takes seconds for a large vocabulary, checks no bounds, and never comes back from a damaged array length.

Source: ggml docs/gguf.md, versions 2 and 3; row order and names as in llama.cpp's convert_hf_to_gguf.py.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from schemas.errors import InputError
from tasks.models.headers import FLOATS, STORED_AS, TensorHeader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE = "llama"
MAX_DIMENSIONS = 4
MAX_ITEMS = 2**24  # of a list in the metadata; the longest are vocabularies
NAMES_SHOWN = 5  # of tensors in an error message
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}  # struct's codes
SPLIT_COUNT = "split.count"

# Types that are read: the three plain ones, and all that the gguf package dequantizes.
DEQUANTIZED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
READABLE = (*FLOATS, *DEQUANTIZED)

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.weight")

# What a plain Llama's metadata may say about the computation, without the prefix `llama.`; None: any value, used here.
_KNOWN: dict[str, tuple[Any, ...] | None] = {
    "block_count": None,
    "context_length": None,
    "embedding_length": None,
    "feed_forward_length": None,
    "vocab_size": None,
    "attention.head_count": None,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "attention.layer_norm_rms_epsilon": None,
    "rope.dimension_count": None,
    "rope.freq_base": None,
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
}


@dataclass(frozen=True)
class GgufHeader(TensorHeader):
    """Where one tensor lies in a GGUF file, and what was done to its rows.

    Args:
        heads: heads whose rows stand in the order of ggml's rotary kernel, each half's rows alternating; 0: none.
    """

    heads: int = 0


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Args:
        path: the file.
        metadata: numbers, texts, truth values, and lists of them, by name.
        tensors: the tensors by their names in the file; shapes in NumPy's order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata, or the default where it is absent.

        Raises:
            InputError: it is of another kind.
        """
        value = self.metadata.get(name, default)
        if value is not default and type(value) is not kind:
            raise damaged(self.path, f"{name} is {_short(value)}, not of the type {kind.__name__}")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, remembered as long as the file stays as it is.

    Raises:
        InputError: there is no such file, or it is no whole GGUF file of a version that is read.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise InputError("model.file_missing", path=path) from error
    return _read(path, stat.st_size, stat.st_mtime_ns)


def gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that a Hugging Face folder of the same model would have.

    Raises:
        InputError: as `open_gguf`; the architecture is another, an option is set that the decoder here does not
            compute, or a size is absent.
    """
    file = open_gguf(path)
    _check_supported(file)

    def number(name: str, kind: type = int, default: Any = None) -> Any:
        value = file.get(f"{ARCHITECTURE}.{name}", kind, default)
        if value is None:
            raise damaged(path, f"{ARCHITECTURE}.{name} is absent")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged(path, "it has no token_embd.weight")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    if not 0 < heads <= hidden:
        raise damaged(path, f"{ARCHITECTURE}.attention.head_count is {heads}")
    blocks = number("block_count")
    if blocks > len(file.tensors):
        raise damaged(path, f"{ARCHITECTURE}.block_count is {blocks}, but there are {len(file.tensors)} tensors")
    rotary = number("rope.dimension_count", default=hidden // heads)
    head_size = number("attention.key_length", default=rotary)
    if not rotary == head_size == number("attention.value_length", default=head_size):
        problem = f"rotary positions in {rotary} of {head_size} dimensions of a head, or values of another size"
        raise unsupported(path, problem, "heads that are turned whole")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", default=heads),
        "head_dim": head_size,
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(number("rope.freq_base", float, 10000.0)),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    for field in ("bos", "eos"):
        token = file.get(f"tokenizer.ggml.{field}_token_id", int)
        if token is not None:
            config[f"{field}_token_id"] = token
    return config


def gguf_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors by their Hugging Face names.

    Raises:
        InputError: as `gguf_config`; or the file holds a tensor that a plain Llama does not have.
    """
    config = gguf_config(path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    headers: dict[str, TensorHeader] = {}
    unknown: list[str] = []
    for name, found in open_gguf(path).tensors.items():
        block = _BLOCK.fullmatch(name)
        kind = block[2] if block else name.removesuffix(".weight")
        known = _NAMES.get(kind) if name.endswith(".weight") else None
        if known is None or (block is not None) == known.startswith(("model.", "lm_head")):
            unknown.append(name)
            continue
        target = f"model.layers.{block[1]}.{known}.weight" if block else f"{known}.weight"
        turned = heads.get(kind, 0)
        if turned and found.shape[0] % (2 * turned):
            raise damaged(path, f"{name} has {found.shape[0]} rows, which are not {turned} heads of an even size")
        headers[target] = GgufHeader(path, found.dtype, found.shape, found.offset, turned)
    if unknown:
        more = f" and {len(unknown) - NAMES_SHOWN} more" if len(unknown) > NAMES_SHOWN else ""
        found_names = f"the tensors {', '.join(unknown[:NAMES_SHOWN])}{more}"
        raise unsupported(path, found_names, "the tensors of a plain Llama")
    return headers


def read_gguf_tensor(header: TensorHeader) -> NDArray[Any]:
    """One tensor: float16 and bfloat16 as stored (bfloat16's bits as uint16), else float32, in Hugging Face's rows.

    Raises:
        InputError: it is of a type that is not read.
    """
    if header.dtype not in READABLE:
        raise unsupported(header.path, f"tensors of type {header.dtype}", ", ".join(READABLE))
    count = prod(header.shape)
    if header.dtype in STORED_AS:
        values: NDArray[Any] = np.fromfile(header.path, STORED_AS[header.dtype], count, offset=header.offset)
    else:
        kind = gguf.GGMLQuantizationType[header.dtype]
        rows = np.fromfile(header.path, np.uint8, _size_bytes(header.dtype, count), offset=header.offset)
        values = gguf.dequantize(rows.reshape(*header.shape[:-1], -1), kind)
    values = values.reshape(header.shape)
    if isinstance(header, GgufHeader) and header.heads:
        # a head's rows are 0, h/2, 1, h/2 + 1, ... in the file
        apart = values.reshape(header.heads, -1, 2, *header.shape[1:])  # (H, C / 2, 2, ...)
        values = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(header.shape)
    return values


def damaged(path: Path, problem: str) -> InputError:
    """The error for a file that is not what it should be."""
    return InputError("model.weights_unreadable", path=path, problem=problem)


def unsupported(path: Path, found: str, known: str) -> InputError:
    """The error for a sound file with something that is not read here."""
    return InputError("model.gguf_unsupported", path=path, found=found, known=known)


@lru_cache(maxsize=2)
def _read(path: Path, size: int, _mtime_ns: int) -> GgufFile:
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise damaged(path, "it is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(path, content, size).header()
    except OSError as error:
        raise damaged(path, str(error)) from error


class _Cursor:
    """Reads the header's parts one after the other, each held against the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path, self._content, self._size, self._at = path, content, size, len(MAGIC)

    def header(self) -> GgufFile:
        version = self._number("I")
        if version not in VERSIONS:
            big_endian = not version & 0xFFFF
            raise damaged(self._path, "it is big-endian" if big_endian else f"it is of version {version}, not 2 or 3")
        tensors, values = self._number("Q"), self._number("Q")
        self._need(24 * tensors + 13 * values, f"{tensors} tensors and {values} values")  # their least sizes
        metadata: dict[str, Any] = {}
        for _ in range(values):
            name = self._text()
            if name in metadata:
                raise damaged(self._path, f"{name} stands twice")
            metadata[name] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise damaged(self._path, f"general.alignment is {_short(alignment)}, not a power of two")
        entries = [self._tensor() for _ in range(tensors)]
        data_start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, self._placed(entries, data_start))

    def _placed(self, entries: list[tuple[str, str, tuple[int, ...], int]], data_start: int) -> dict[str, TensorHeader]:
        headers: dict[str, TensorHeader] = {}
        end = data_start
        for name, dtype, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            begin = data_start + offset
            if name in headers:
                raise damaged(self._path, f"the tensor {name} stands twice")
            if begin < end:
                raise damaged(self._path, f"the tensor {name} overlaps another")
            end = begin + _size_bytes(dtype, prod(shape))
            if end > self._size:
                raise damaged(self._path, f"it is cut short: {name} ends at byte {end}, the file at {self._size}")
            headers[name] = TensorHeader(self._path, dtype, shape, begin)
        return {name: headers[name] for name, *_ in entries}

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise damaged(self._path, f"the tensor {_short(name)} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        try:
            dtype = gguf.GGMLQuantizationType(number).name
        except ValueError as error:
            raise damaged(self._path, f"the tensor {_short(name)} is of the unknown type {number}") from error
        if not all(shape) or shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)][0]:
            raise damaged(self._path, f"the tensor {_short(name)} of type {dtype} has the shape {shape}")
        return name, dtype, shape, offset

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if count > MAX_ITEMS:
                raise damaged(self._path, f"it holds a list of {count} values")
            if kind == STRING:
                self._need(8 * count, f"a list of {count} texts")
                return [self._text() for _ in range(count)]
            if kind in SCALARS:
                values = self._numbers(SCALARS[kind], count)
                return [bool(value) for value in values] if kind == BOOL else list(values)
            raise damaged(self._path, f"it holds a list of the unknown type {kind}")
        if kind not in SCALARS:
            raise damaged(self._path, f"it holds a value of the unknown type {kind}")
        value = self._number(SCALARS[kind])
        return bool(value) if kind == BOOL else value

    def _text(self) -> str:
        length = self._number("Q")
        self._need(length, f"a text of {length} bytes")
        raw = self._content[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise damaged(self._path, f"the text at byte {self._at - length} is not UTF-8") from error

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{code}")
        self._need(size, f"{count} numbers")
        values = struct.unpack_from(f"<{count}{code}", self._content, self._at)
        self._at += size
        return values

    def _need(self, count: int, what: str) -> None:
        if self._at + count > self._size:
            raise damaged(self._path, f"it is cut short: no room for {what} at byte {self._at} of {self._size}")


def _check_supported(file: GgufFile) -> None:
    """Refuse, by name, whatever the plain Llama decoder would compute otherwise."""
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise unsupported(file.path, f"the architecture {_short(architecture)}", ARCHITECTURE)
    if file.metadata.get(SPLIT_COUNT, 0) not in (0, 1):
        raise unsupported(file.path, "a part of a model that is split into several files", "a model in one file")
    for name, value in file.metadata.items():
        option = name.removeprefix(f"{ARCHITECTURE}.")
        if option == name:
            continue
        allowed = _KNOWN.get(option, ())
        if allowed is not None and value not in allowed:
            raise unsupported(file.path, f"{name} = {_short(value)}", "the plain Llama, without this option")
    if "rope_freqs.weight" in file.tensors:
        raise unsupported(file.path, "scaled rotary frequencies (rope_freqs.weight)", "unscaled ones")


def _size_bytes(dtype: str, count: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return count // block * size


def _shortest(value: float) -> float:
    """The shortest number that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
