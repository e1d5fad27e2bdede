"""What a decoder looks like, from the config.json of its folder or a GGUF file, and what tensors it must have.

Planning uses this module: it reads JSON and the headers of weights, and imports no MindSpore.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from schemas.errors import InputError
from tasks.models.families import DecoderSpec as DecoderSpec
from tasks.models.families import spec_of
from tasks.models.headers import FLOATS, is_gguf, read_headers

log = logging.getLogger("mindtune.models")

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NAMES_SHOWN = 5  # tensor names of one kind in an error message

# Rotary frequencies, which older versions of Transformers saved; they follow from config.json and are computed here.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq)")


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
    """What the decoder of a checkpoint, folder or GGUF file, looks like.

    Raises:
        InputError: as `read_config` and `families.spec_of`.
    """
    return spec_of(base, read_config(base))


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
        "input_layernorm": _vector(width),
        "self_attn.q_proj": _matrix(queries, width, spec.input_bias),
        "self_attn.k_proj": _matrix(keys, width, spec.input_bias),
        "self_attn.v_proj": _matrix(keys, width, spec.input_bias),
        "self_attn.q_norm": _vector(spec.head_size) if spec.query_key_norm else {},
        "self_attn.k_norm": _vector(spec.head_size) if spec.query_key_norm else {},
        "self_attn.o_proj": _matrix(width, queries, spec.output_bias),
        "post_attention_layernorm": _vector(width),
        "mlp.gate_proj": _matrix(spec.intermediate, width, spec.feed_forward_bias),
        "mlp.up_proj": _matrix(spec.intermediate, width, spec.feed_forward_bias),
        "mlp.down_proj": _matrix(width, spec.intermediate, spec.feed_forward_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocabulary, width)}
    for index in range(spec.layers):
        for part, tensors in block.items():
            shapes |= {f"model.layers.{index}.{part}.{name}": shape for name, shape in tensors.items()}
    shapes["model.norm.weight"] = (width,)
    if not spec.tied_head:
        shapes[HEAD] = (spec.vocabulary, width)
    return shapes


def _vector(size: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (size,)}


def _matrix(out_channels: int, in_channels: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {"weight": (out_channels, in_channels)} | ({"bias": (out_channels,)} if bias else {})


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
