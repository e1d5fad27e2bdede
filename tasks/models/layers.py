"""The parts of a decoder: norm, rotary positions, attention, feed-forward. Names follow the Hugging Face tensors.

Weights start at zero and are set by `loading`; a Dense with weight_init="zeros" takes no time and no memory until then.
Each Cell computes in the type of its input; norms and softmax compute in float32 always.

Nothing large is multiplied by or added to a tensor of another shape: on CPU such an operator of MindSpore 2.7.0 keeps
two index lists of 8 bytes for each element of its output, for as long as the graph lives, and is half as fast. Angles
and masks are spread to full size once for all layers instead, and the norm takes an outer product.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from numpy.typing import NDArray

from tasks.models.families import DecoderSpec

Angles = tuple[Tensor, Tensor]  # cosine and sine

MASKED = -1e9  # added to a score: its weight becomes exactly 0, and unlike -inf it can't turn into NaN


def dense(in_channels: int, out_channels: int, bias: bool = False) -> nn.Dense:
    """A linear layer, weight (out_channels, in_channels) still to be set.

    Its bias (out_channels,), None without one, is added by ops.BiasAdd, which spreads nothing; an adapter that takes
    the layer's place has to do the same.
    """
    return nn.Dense(in_channels, out_channels, weight_init="zeros", bias_init="zeros", has_bias=bias)


def as_type(x: Tensor, dtype: mstype.Type) -> Tensor:
    """A tensor in a type; the tensor itself where it is of that type already."""
    return x if x.dtype == dtype else x.astype(dtype)


def causal_mask(tokens: int, window: int | None = None) -> NDArray[np.float32]:
    """What is added to the scores (T, T): 0 for a token's own position and those before it, MASKED for others.

    Args:
        tokens: T.
        window: positions that a token sees at most, its own included; None: all before it.
    """
    mask = np.triu(np.full((tokens, tokens), MASKED, np.float32), k=1)
    if window is not None:
        mask += np.tril(np.full((tokens, tokens), MASKED, np.float32), k=-window)
    return mask


class RMSNorm(nn.Cell):
    """Scale each vector to a root mean square of 1, then by a weight.

    Args:
        width: D.
        epsilon: added to the mean square.
    Inputs:
        x: (..., D).
    Outputs:
        (..., D).
    Source: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4. Written out: ops.rms_norm has no CPU kernel in
    MindSpore 2.7.0.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer("zeros", (width,), mstype.float32), name="weight")
        self.epsilon = epsilon
        self.outer = ops.MatMul()

    def construct(self, x: Tensor) -> Tensor:
        """See the class."""
        exact = as_type(x, mstype.float32)
        mean_square = ops.square(exact).mean(-1, keep_dims=True)  # (..., 1)
        scale = ops.rsqrt(mean_square + self.epsilon).reshape(-1, 1)  # (all, 1)
        factors = self.outer(scale, self.weight.expand_dims(0))  # (all, D)
        return as_type(exact * factors.reshape(x.shape), x.dtype)


class Rotary(nn.Cell):
    """Turn the pairs (i, i + C/2) of each head by an angle that grows with the position.

    Inputs:
        x: (B, T, heads, C).
        angles: cosine and sine, see `rotary.rotary_tables`, (B, T, heads, C/2) each, or (T, 1, C/2) for few tokens.
    Outputs:
        (B, T, heads, C).
    Source: as `rotary.rotary_frequencies`; pairs half a head apart instead of neighbours, as in Hugging Face
    checkpoints, whose query and key rows are ordered for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split = ops.Split(axis=-1, output_num=2)
        self.join = ops.Concat(axis=-1)

    def construct(self, x: Tensor, angles: Angles) -> Tensor:
        """See the class."""
        cosine, sine = angles
        first, second = self.split(x)  # (B, T, heads, C/2) each
        return self.join((first * cosine - second * sine, second * cosine + first * sine))


class Attention(nn.Cell):
    """Grouped-query attention, in two parts so that a decoder with a cache can put its own keys and values between.

    Args:
        spec: sizes D, H, K, C; biases; whether queries and keys are normed.
    Inputs:
        x: (B, T, D).
        angles, key_angles: cosine and sine for the H heads of queries and the K heads of keys, see `Rotary`.
        mask: (B, K, H/K, T, T), or (T, T) for few tokens; added to the scores.
    Outputs:
        (B, T, D).
    Source: Ainslie et al. 2023, arXiv 2305.13245; the norm as in modeling_qwen3.py of Transformers 4.57. Query heads of
    a group are put after each other along T, so that keys and values need not be repeated.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_size = spec.heads, spec.key_value_heads, spec.head_size
        self.group = spec.heads // spec.key_value_heads
        self.scale = spec.head_size**-0.5
        self.q_proj = dense(spec.hidden, spec.heads * spec.head_size, spec.input_bias)
        self.k_proj = dense(spec.hidden, spec.key_value_heads * spec.head_size, spec.input_bias)
        self.v_proj = dense(spec.hidden, spec.key_value_heads * spec.head_size, spec.input_bias)
        self.o_proj = dense(spec.heads * spec.head_size, spec.hidden, spec.output_bias)
        self.query_key_norm = spec.query_key_norm
        if spec.query_key_norm:
            self.q_norm = RMSNorm(spec.head_size, spec.norm_epsilon)
            self.k_norm = RMSNorm(spec.head_size, spec.norm_epsilon)
        self.rotary = Rotary()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weighted_sum = ops.BatchMatMul()

    def construct(self, x: Tensor, angles: Angles, key_angles: Angles, mask: Tensor) -> Tensor:
        """See the class."""
        queries, keys, values = self.project(x, angles, key_angles)
        return self.attend(queries, keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3), mask)

    def project(self, x: Tensor, angles: Angles, key_angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, C), keys and values (B, T, K, C); queries and keys turned by their positions."""
        batch, tokens, _ = x.shape
        queries = self.q_proj(x).reshape(batch, tokens, self.heads, self.head_size)
        keys = self.k_proj(x).reshape(batch, tokens, self.key_value_heads, self.head_size)
        values = self.v_proj(x).reshape(batch, tokens, self.key_value_heads, self.head_size)
        if self.query_key_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return self.rotary(queries, angles), self.rotary(keys, key_angles), values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Mix the values and project them back to (B, T, D).

        Queries are (B, T, H, C), keys and values (B, K, S, C), the mask (T, S) or (B, K, H/K, T, S).
        """
        batch, tokens, _, _ = queries.shape
        grouped = (queries * self.scale).reshape(batch, tokens, self.key_value_heads, self.group, self.head_size)
        grouped = grouped.transpose(0, 2, 3, 1, 4)  # (B, K, H/K, T, C)
        grouped = grouped.reshape(batch, self.key_value_heads, self.group * tokens, self.head_size)
        scores = as_type(self.scores(grouped, keys), mstype.float32)  # (B, K, H/K * T, S)
        scores = scores.reshape(batch, self.key_value_heads, self.group, tokens, keys.shape[2]) + mask
        weights = ops.softmax(scores, -1).reshape(batch, self.key_value_heads, self.group * tokens, keys.shape[2])
        mixed = self.weighted_sum(as_type(weights, values.dtype), values)  # (B, K, H/K * T, C)
        mixed = mixed.reshape(batch, self.key_value_heads, self.group, tokens, self.head_size)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, self.heads * self.head_size)
        return self.o_proj(mixed)


class FeedForward(nn.Cell):
    """The gated part of a block: down(silu(gate(x)) * up(x)).

    Args:
        spec: sizes D, F; biases.
    Inputs:
        x: (B, T, D).
    Outputs:
        (B, T, D).
    Source: Shazeer 2020, arXiv 2002.05202, equation 6 (SwiGLU).
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = dense(spec.hidden, spec.intermediate, spec.feed_forward_bias)
        self.up_proj = dense(spec.hidden, spec.intermediate, spec.feed_forward_bias)
        self.down_proj = dense(spec.intermediate, spec.hidden, spec.feed_forward_bias)

    def construct(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))
