"""Write GGUF files: a Llama checkpoint folder's weights in a type, and a tokenizer, with the gguf package's writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp's converter orders them: the two halves' rows alternate."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The name that a tensor of a Hugging Face folder has in a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def write_llama(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    dtype: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a checkpoint; matrices in a type, norms in float32.

    Args:
        path: the file.
        config: the values of config.json.
        tensors: by their Hugging Face names.
        dtype: GGUF's name of the type.
        metadata: further values, or others in place of those that follow from the configuration; None: left out.
        extra: tensors by their GGUF names.
    """
    writer = gguf.GGUFWriter(path, None)
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.rope.dimension_count": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        "llama.attention.key_length": config.get("head_dim"),
        "llama.attention.value_length": config.get("head_dim"),
        **(metadata or {}),
    }
    for name, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        target = gguf_name(name)
        kind = target.removesuffix(".weight").rpartition(".")[2]
        turned = rotary_order(tensor, heads[kind]) if kind in heads else tensor
        stored = gguf.GGMLQuantizationType["F32" if turned.ndim == 1 else dtype]
        writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(turned), stored), raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(tensors: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The tensors as they come back from a type."""
    kind = gguf.GGMLQuantizationType[dtype]
    return {
        name: tensor if tensor.ndim == 1 else gguf.dequantize(gguf.quantize(tensor, kind), kind).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def sentence_piece_metadata(model: Path) -> dict[str, Any]:
    """What llama.cpp's converter writes of a SentencePiece model."""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(model))
    numbers = range(pieces.vocab_size())

    def kind(number: int) -> int:
        if pieces.is_unknown(number):
            return 2
        return 3 if pieces.is_control(number) else 6 if pieces.is_byte(number) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [float(pieces.get_score(number)) for number in numbers],
        "tokenizer.ggml.token_type": [kind(number) for number in numbers],
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def byte_level_metadata(tokenizer: Path, pre: str, /, special: str = "<|end|>", **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer.json, with one control token after its vocabulary."""
    import json

    model = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), special]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (len(tokens) - 1), 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }
