"""The decoder: embedding, blocks, final norm, head. One pass over whole rows, without a cache.

    input_ids (B, T) -> embed_tokens -> [ + self_attn(norm) -> + mlp(norm) ] x layers -> norm -> hidden (B, T, D)
    hidden (..., D) -> logits (..., V)

Parameter names are the tensor names of a Hugging Face checkpoint. What the families differ in is in `families`.

Source: Touvron et al. 2023, arXiv 2302.13971, section 2.2; modeling_llama.py, modeling_mistral.py, modeling_qwen2.py
and modeling_qwen3.py of Transformers 4.57.
"""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from tasks.models.families import DecoderSpec
from tasks.models.layers import (
    MASKED,
    Angles,
    Attention,
    FeedForward,
    RMSNorm,
    as_type,
    causal_mask,
    dense,
)
from tasks.models.rotary import rotary_frequencies, rotary_tables


def _tables(tokens: int, frequencies: tuple[float, ...], window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosine, sine (T, C/2), mask and mask with window (T, T), computed once when a graph for T tokens is compiled."""
    cosine, sine = rotary_tables(tokens, frequencies)
    return Tensor(cosine), Tensor(sine), Tensor(causal_mask(tokens)), Tensor(causal_mask(tokens, window))


_constants = ops.constexpr(_tables)


class Embedding(nn.Cell):
    """A vector for each token id.

    Args:
        vocabulary: V.
        width: D.
    Inputs:
        input_ids: (B, T) int32, from 0 to V - 1.
    Outputs:
        (B, T, D).
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer("zeros", (vocabulary, width), mstype.float32), name="weight")

    def construct(self, input_ids: Tensor) -> Tensor:
        """See the class."""
        return ops.gather(self.weight, input_ids, 0)


class Block(nn.Cell):
    """One layer: attention, then feed-forward, each on the normed input and added to it.

    Args:
        spec: see `families.DecoderSpec`.
        index: its number in the decoder, from 0.
    Inputs:
        x: (B, T, D).
        angles, key_angles, mask: see `Attention`.
    Outputs:
        (B, T, D).
    """

    def __init__(self, spec: DecoderSpec, index: int) -> None:
        super().__init__()
        self.windowed = index in spec.windowed_layers  # which of the two masks is for it
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.mlp = FeedForward(spec)

    def construct(self, x: Tensor, angles: Angles, key_angles: Angles, mask: Tensor) -> Tensor:
        """See the class."""
        x = x + self.self_attn(self.input_layernorm(x), angles, key_angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Cell):
    """All of the decoder but the head; a part of its own because the tensors are named `model.*`.

    Args:
        spec: see `families.DecoderSpec`.
    Inputs:
        input_ids: (B, T) int32.
        segment_ids, positions: (B, T) int32, or neither; see `Decoder`.
    Outputs:
        (B, T, D), after the final norm.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_size = spec.heads, spec.key_value_heads, spec.head_size
        self.frequencies, self.window = rotary_frequencies(spec), spec.window
        self.embed_tokens = Embedding(spec.vocabulary, spec.hidden)
        self.layers = nn.CellList([Block(spec, index) for index in range(spec.layers)])
        self.norm = RMSNorm(spec.hidden, spec.norm_epsilon)

    def construct(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """See the class."""
        batch, tokens = input_ids.shape
        cosine, sine, mask, windowed_mask = _constants(tokens, self.frequencies, self.window)
        if segment_ids is not None:
            cosine, sine = ops.gather(cosine, positions, 0), ops.gather(sine, positions, 0)  # (B, T, C/2)
            apart = segment_ids.expand_dims(2) != segment_ids.expand_dims(1)  # (B, T, T)
            other = apart.astype(mstype.float32) * MASKED
            # Tokens of a segment are as far apart in the row as in the segment, so that the window needs no positions.
            mask = ops.minimum(mask, other).expand_dims(1).expand_dims(1)
            windowed_mask = ops.minimum(windowed_mask, other).expand_dims(1).expand_dims(1)
        full_shape = (batch, self.key_value_heads, self.heads // self.key_value_heads, tokens, tokens)
        mask, windowed_mask = ops.broadcast_to(mask, full_shape), ops.broadcast_to(windowed_mask, full_shape)
        x = self.embed_tokens(input_ids)
        cosine, sine = as_type(cosine, x.dtype).expand_dims(-2), as_type(sine, x.dtype).expand_dims(-2)
        shape = (batch, tokens, self.heads, self.head_size // 2)
        key_shape = (batch, tokens, self.key_value_heads, self.head_size // 2)
        angles = ops.broadcast_to(cosine, shape), ops.broadcast_to(sine, shape)
        key_angles = ops.broadcast_to(cosine, key_shape), ops.broadcast_to(sine, key_shape)
        for layer in self.layers:
            x = layer(x, angles, key_angles, windowed_mask if layer.windowed else mask)
        return self.norm(x)


class Decoder(nn.Cell):
    """A decoder whose weights are still to be set (see `loading.load_decoder`).

    Each token sees itself and those before it. Rows that are padded on the right need no mask: what stands after a
    token does not reach it, and the hidden states of padding are not to be used. In packed rows a token sees those of
    its own segment only, and its position counts from the segment's start: the result is that of rows of their own.

    Args:
        spec: see `families.DecoderSpec`.
    Inputs:
        input_ids: (B, T) int32, from 0 to V - 1. Every new (B, T) compiles a graph of its own, seconds each.
        segment_ids: (B, T) int32, the segment of each token; without them a row is one segment.
        positions: (B, T) int32, the place of each token in its segment, below T; given with segment_ids only.
    Outputs:
        (B, T, D) float32, the hidden states after the final norm; `logits` makes logits of those that are wanted.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.width = spec.hidden
        self.tied_head = spec.tied_head
        self.model = Trunk(spec)
        if not spec.tied_head:
            self.lm_head = dense(spec.hidden, spec.vocabulary)
        self.project = ops.MatMul(transpose_b=True)

    def construct(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """See the class."""
        return self.model(input_ids, segment_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D); for use inside the construct of another Cell."""
        weight = self.model.embed_tokens.weight if self.tied_head else self.lm_head.weight  # (V, D)
        flat = self.project(hidden.reshape(-1, self.width), weight)  # (all, V)
        return flat.reshape((*hidden.shape[:-1], -1))
