"""The families of decoders that are computed here, and what a config.json of each says of its decoder.

They share one form: RMS norm, rotary positions, grouped-query attention, gated feed-forward. What sets them apart:

| family | biases | norm of queries and keys | attention to the last tokens only |
|---|---|---|---|
| Llama 1 to 3, Yi, SmolLM2 | where attention_bias, mlp_bias say so | | |
| Mistral | | | sliding_window, all layers |
| Qwen2, Qwen2.5 | of queries, keys, values | | where use_sliding_window says so, from max_window_layers on |
| Qwen3 | where attention_bias says so | yes | as Qwen2 |

Whatever a config.json asks for besides is refused by name. No MindSpore: planning uses this module.

Source: configuration and modeling files of Transformers 4.57, for what each setting means and what absent ones are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from schemas.errors import InputError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are slowed down for texts longer than those of the first training.

    Args:
        kind: linear: all of them by the factor; llama3: the slow ones by the factor, the fast ones not at all, those
            between gradually.
        factor: what a frequency is divided by.
        slow, fast: llama3 only: turns within the original positions, below which a frequency counts as slow and above
            which as fast.
        original_positions: llama3 only: tokens that the model was first trained for.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    slow: float = 0.0
    fast: float = 0.0
    original_positions: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """What a decoder looks like.

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
        rope_scaling: how the rotary frequencies are scaled, if at all.
        input_bias: the projections to queries, keys and values have biases.
        output_bias: the projection after attention has one.
        feed_forward_bias: the projections of the feed-forward part have them.
        query_key_norm: each head's queries and keys are normed before they are turned.
        window: tokens that a token sees in the windowed layers, itself included; None: all before it.
        windowed_layers: numbers of the layers that the window holds for.
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
    rope_scaling: RopeScaling | None = None
    input_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    query_key_norm: bool = False
    window: int | None = None
    windowed_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Family:
    """What is the same for all models of an architecture.

    Args:
        model_type: its short name in config.json.
        positions, key_value_heads, head_size: where config.json names none; None: as for the first Llama, which has a
            key and value head for each query head, of the size hidden / heads.
        input_bias: queries, keys and values have biases whatever config.json says.
        attention_bias, mlp_bias: settings of these names count.
        query_key_norm: see `DecoderSpec`.
        windows: where the setting sliding_window holds: nowhere, in all layers, or in some if use_sliding_window is on.
    """

    model_type: str
    positions: int
    key_value_heads: int | None = None
    head_size: int | None = None
    input_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    windows: Literal["none", "all", "some"] = "none"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", 2048, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family("mistral", 131_072, key_value_heads=8, windows="all"),
    "Qwen2ForCausalLM": Family("qwen2", 32_768, key_value_heads=32, input_bias=True, windows="some"),
    "Qwen3ForCausalLM": Family(
        "qwen3", 32_768, key_value_heads=32, head_size=128, attention_bias=True, query_key_norm=True, windows="some"
    ),
}
DEFAULT_WINDOW = 4096  # where a config.json that has windows says nothing of their size

# Options that change what the model computes, with the values under which it is computed as here.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1.0, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
}

# Dynamic scaling leaves texts within max_position_embeddings alone, and longer ones are refused.
_ROPE_KINDS = ("default", "dynamic", "linear", "llama3")


def spec_of(base: Path, config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes.

    Absent values are those that Transformers takes for them, except the sizes, which must be there.

    Args:
        base: where the checkpoint lies, for messages.
        config: its config.json.
    Raises:
        InputError: a size is absent or impossible, the architecture is not among `FAMILIES`, or an option is set that
            the decoder here does not compute.
    """
    family = FAMILIES[_architecture(base, config)]
    for field, plain in _PLAIN_VALUES.items():
        if config.get(field, plain[0]) not in plain:
            raise _unsupported(base, field, config[field], json.dumps(plain[0]))
    settings = _Settings(base, config)
    hidden, heads = settings.number("hidden_size"), settings.number("num_attention_heads")
    key_value_heads = settings.number("num_key_value_heads", family.key_value_heads or heads)
    head_size = settings.number("head_dim", family.head_size or hidden // heads)
    layers = settings.number("num_hidden_layers")
    positions = settings.number("max_position_embeddings", family.positions)
    rope, rope_scaling = _rope(settings)
    attention_bias = family.attention_bias and settings.flag("attention_bias")
    window, windowed_layers = _windows(settings, family, layers)
    if heads % key_value_heads:
        problem = f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({key_value_heads})"
        raise settings.wrong(problem)
    if head_size % 2:
        raise settings.wrong(f"the head size ({head_size}) is odd; rotary positions turn pairs")
    return DecoderSpec(
        vocabulary=settings.number("vocab_size"),
        hidden=hidden,
        intermediate=settings.number("intermediate_size"),
        layers=layers,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        norm_epsilon=float(settings.number("rms_norm_eps", 1e-6, float)),
        rope_theta=float(settings.number("rope_theta", rope.get("rope_theta", 10000.0), float)),
        positions=positions,
        tied_head=settings.flag("tie_word_embeddings"),
        rope_scaling=rope_scaling,
        input_bias=family.input_bias or attention_bias,
        output_bias=attention_bias,
        feed_forward_bias=family.mlp_bias and settings.flag("mlp_bias"),
        query_key_norm=family.query_key_norm,
        window=window,
        windowed_layers=windowed_layers,
    )


class _Settings:
    """The values of a config.json, or of a part of it, held against their kinds."""

    def __init__(self, base: Path, values: Mapping[str, Any], part: str = "") -> None:
        self.base, self.values, self.part = base, values, part

    def number(self, field: str, default: Any = None, kind: type[int | float] = int) -> Any:
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
            raise self.wrong(f"{self.part}{field} is {value!r}, not a positive number")
        return value

    def flag(self, field: str) -> bool:
        value = self.values.get(field) or False
        if not isinstance(value, bool):
            raise self.wrong(f"{self.part}{field} is {value!r}, not true or false")
        return value

    def wrong(self, problem: str) -> InputError:
        return InputError("model.no_config", path=self.base, problem=problem)


def _architecture(base: Path, config: Mapping[str, Any]) -> str:
    named: Sequence[Any] = config.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    if len(named) != 1 or named[0] not in FAMILIES:
        found = ", ".join(map(str, named)) if named else config.get("model_type") or "none named"
        raise InputError("model.unknown_architecture", path=base, found=found, known=", ".join(FAMILIES))
    return str(named[0])


def _rope(settings: _Settings) -> tuple[Mapping[str, Any], RopeScaling | None]:
    """The settings of the rotary positions, under their old or new name, and the scaling that they ask for."""
    field = "rope_scaling" if settings.values.get("rope_scaling") else "rope_parameters"
    rope = settings.values.get(field) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in _ROPE_KINDS:
        raise _unsupported(settings.base, field, rope, ", ".join(_ROPE_KINDS))
    part = _Settings(settings.base, rope, f"{field}.")
    if kind == "linear":
        return rope, RopeScaling("linear", float(part.number("factor", kind=float)))
    if kind != "llama3":
        return rope, None
    scaling = RopeScaling(
        "llama3",
        float(part.number("factor", kind=float)),
        slow=float(part.number("low_freq_factor", kind=float)),
        fast=float(part.number("high_freq_factor", kind=float)),
        original_positions=part.number("original_max_position_embeddings"),
    )
    if scaling.fast <= scaling.slow:
        problem = f"{field}.high_freq_factor ({scaling.fast}) is not above low_freq_factor ({scaling.slow})"
        raise settings.wrong(problem)
    return rope, scaling


def _windows(settings: _Settings, family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that it holds for."""
    if family.windows == "none" or (family.windows == "some" and not settings.flag("use_sliding_window")):
        return None, ()
    if settings.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None, ()
    window = settings.number("sliding_window", DEFAULT_WINDOW)
    kinds = settings.values.get("layer_types")
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(map(str, kinds)):
            raise _unsupported(settings.base, "layer_types", kinds, f"{layers} of {' and '.join(sorted(known))}")
        windowed = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    elif family.windows == "all":
        windowed = tuple(range(layers))
    else:
        first = settings.values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise settings.wrong(f"max_window_layers is {first!r}, not a number of layers")
        windowed = tuple(range(min(first, layers), layers))
    return (window, windowed) if windowed else (None, ())


def _unsupported(base: Path, field: str, found: Any, known: str) -> InputError:
    return InputError("model.unsupported_option", path=base, field=field, found=found, known=known)
