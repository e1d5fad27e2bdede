"""What a decoder looks like, from the config.json of its folder or a GGUF file, and what tensors it must have.

Planning uses this module: it reads JSON and the headers of weights, and imports no MindSpore.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from schemas.errors import InputError
from tasks.models.headers import FLOATS, is_gguf, read_headers

log = logging.getLogger("mindtune.models")

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NAMES_SHOWN = 5  # tensor names of one kind in an error message

# Rotary frequencies, which older versions of Transformers saved; they follow from config.json and are computed here.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq)")

# Options that change what the model computes, with the values under which it is the plain Llama.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class DecoderSpec:
    """The sizes of a Llama decoder.

    Args:
        vocabulary: V, rows of the embedding.
        hidden: D, width of the model.
        intermediate: F, width inside the feed-forward part.
        layers: blocks of attention and feed-forward.
        heads: H, query heads.
        key_value_heads: K, key and value heads; each serves H / K query heads that follow each other.
        head_size: C; H * C need not be D.
        norm_epsilon: added to the mean square under the root.
        rope_theta: base of the rotary frequencies.
        positions: tokens that the model was made for (max_position_embeddings).
        tied_head: the logits use the embedding itself; there is no lm_head tensor.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    norm_epsilon: float
    rope_theta: float
    positions: int
    tied_head: bool


def read_config(base: Path) -> dict[str, Any]:
    """The config.json of a checkpoint; of a GGUF file the one that its metadata amount to.

    Raises:
        InputError: the folder or a readable config.json is missing; or as `gguf_file.gguf_config`.
    """
    if is_gguf(base):
        from tasks.models.gguf_file import gguf_config

        return gguf_config(base)
    folder = base
    if not folder.is_dir():
        raise InputError("model.folder_missing", path=folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise InputError("model.no_config", path=folder, problem="the file is missing") from error
    except (OSError, ValueError) as error:
        raise InputError("model.no_config", path=folder, problem=error) from error
    if not isinstance(config, dict):
        raise InputError("model.no_config", path=folder, problem="it holds no JSON object")
    return config


def read_spec(base: Path) -> DecoderSpec:
    """Read the sizes of a checkpoint, folder or GGUF file.

    Absent values are those that Transformers' LlamaConfig (4.57) takes for them, except the sizes, which must be there.

    Raises:
        InputError: as `read_config`; or a size is absent or impossible, the architecture is another, or an option is
            set that the decoder here does not compute.
    """
    config = read_config(base)
    _check_architecture(base, config)
    _check_options(base, config)
    return _spec_of(base, config)


def tensor_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, from the headers of its files.

    Raises:
        InputError: there are no weights, or a file is damaged.
    """
    return {name: header.shape for name, header in read_headers(base).items()}


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a decoder of these sizes has, in model order."""
    width, queries, keys = spec.hidden, spec.heads * spec.head_size, spec.key_value_heads * spec.head_size
    block = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (spec.intermediate, width),
        "mlp.up_proj": (spec.intermediate, width),
        "mlp.down_proj": (width, spec.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocabulary, width)}
    for index in range(spec.layers):
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in block.items()}
    shapes["model.norm.weight"] = (width,)
    if not spec.tied_head:
        shapes[HEAD] = (spec.vocabulary, width)
    return shapes


def check_tensors(folder: Path, spec: DecoderSpec) -> None:
    """Hold the tensors of a checkpoint against the model: every one must be there, and none besides.

    Two kinds of surplus tensors are let pass, with a log line: rotary frequencies (`rotary_emb.inv_freq`), which are
    computed here, and the lm_head.weight of a model whose head is tied to the embedding, if it has the embedding's
    shape (some programs save it under both names; `loading` compares the values).

    Raises:
        InputError: tensors are missing, left over, or of another shape or of a type that is not read; all in one
            message. Or there are no weights, or a file is damaged.
    """
    headers = read_headers(folder)
    readable = _readable_types(folder)
    found = {name: header.shape for name, header in headers.items()}
    expected = expected_shapes(spec)
    surplus = known_surplus(found, spec)
    missing = [name for name in expected if name not in found]
    left_over = [name for name in found if name not in expected and name not in surplus]
    shapes = [
        f"{name} {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    shapes += [
        f"{name} of type {headers[name].dtype}, expected {' or '.join(readable)}"
        for name in expected
        if name in headers and headers[name].dtype not in readable
    ]
    if missing or left_over or shapes:
        raise InputError(
            "model.tensors", path=folder, missing=_some(missing), left_over=_some(left_over), shapes=_some(shapes)
        )
    if surplus:
        log.info("%s: not used, as known: %s", folder, _some(surplus))


def _readable_types(base: Path) -> tuple[str, ...]:
    if is_gguf(base):
        from tasks.models.gguf_file import READABLE

        return READABLE
    return FLOATS


def known_surplus(shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec) -> list[str]:
    """The tensors that a checkpoint may hold although the model has none of that name (see `check_tensors`)."""
    surplus = [name for name in shapes if _BUFFER.fullmatch(name)]
    if spec.tied_head and shapes.get(HEAD) == (spec.vocabulary, spec.hidden):
        surplus.append(HEAD)
    return surplus


def linear_layers(spec: DecoderSpec) -> tuple[str, ...]:
    """Full names, in model order, of the layers that can have an adapter: the projections of every block."""
    return tuple(name.removesuffix(".weight") for name in expected_shapes(spec) if name.endswith("_proj.weight"))


def match_targets(targets: Sequence[str], spec: DecoderSpec) -> tuple[str, ...]:
    """Full names, in model order, of the layers that target names stand for.

    A target stands for every layer whose name is the target or ends with it after a dot: "q_proj" for the query
    projections of all blocks, "layers.0.self_attn.q_proj" for the first block's.

    Raises:
        InputError: some targets match no layer; all of them are named, with similar names that would.
    Source: PEFT 0.17.1, the rule for a list of target_modules.
    """
    layers = linear_layers(spec)
    unmatched = [target for target in targets if not any(_stands_for(target, layer) for layer in layers)]
    if unmatched:
        kinds = tuple(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
        raise InputError(
            "lora.no_match",
            names=", ".join(unmatched),
            known=", ".join(kinds),
            suggestion=_suggestion(unmatched, kinds),
        )
    return tuple(layer for layer in layers if any(_stands_for(target, layer) for target in targets))


def _stands_for(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _suggestion(unmatched: Sequence[str], kinds: Sequence[str]) -> str:
    close = {name: get_close_matches(name.rsplit(".", 1)[-1], kinds, n=1, cutoff=0.5) for name in unmatched}
    pairs = [f"{matches[0]} instead of {name}" for name, matches in close.items() if matches]
    return f"Did you mean {', '.join(pairs)}?" if pairs else "Take names of the layers above."


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "") if names else "none"


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    named = config.get("architectures") or ([ARCHITECTURE] if config.get("model_type") == MODEL_TYPE else [])
    if named != [ARCHITECTURE]:
        found = ", ".join(map(str, named)) if named else config.get("model_type") or "none named"
        raise InputError("model.unknown_architecture", path=folder, found=found, known=ARCHITECTURE)


def _check_options(folder: Path, config: Mapping[str, Any]) -> None:
    for field, plain in _PLAIN_VALUES.items():
        found = config.get(field, plain[0])
        if found not in plain:
            raise InputError(
                "model.unsupported_option", path=folder, field=field, found=found, known=json.dumps(plain[0])
            )
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if kind != "default":
            raise InputError("model.unsupported_option", path=folder, field=field, found=rope, known="default")


def _spec_of(folder: Path, config: Mapping[str, Any]) -> DecoderSpec:
    def number(field: str, default: Any = None, kind: type[int | float] = int) -> Any:
        value = config.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
            raise InputError("model.no_config", path=folder, problem=f"{field} is {value!r}, not a positive number")
        return value

    def flag(field: str) -> bool:
        value = config.get(field) or False
        if not isinstance(value, bool):
            raise InputError("model.no_config", path=folder, problem=f"{field} is {value!r}, not true or false")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    rope = config.get("rope_parameters") or {}
    spec = DecoderSpec(
        vocabulary=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=heads,
        key_value_heads=number("num_key_value_heads", heads),
        head_size=number("head_dim", hidden // heads),
        norm_epsilon=float(number("rms_norm_eps", 1e-6, float)),
        rope_theta=float(number("rope_theta", rope.get("rope_theta", 10000.0), float)),
        positions=number("max_position_embeddings", 2048),
        tied_head=flag("tie_word_embeddings"),
    )
    if spec.heads % spec.key_value_heads:
        problem = f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({spec.key_value_heads})"
        raise InputError("model.no_config", path=folder, problem=problem)
    if spec.head_size % 2:
        problem = f"the head size ({spec.head_size}) is odd; rotary positions turn pairs"
        raise InputError("model.no_config", path=folder, problem=problem)
    return spec
