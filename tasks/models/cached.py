"""The decoder with a KV cache: the same weights, called with a part of a text at a time.

The cache of a layer is one matrix of keys and one of values, (K * S, C) with S rows for each of the K heads, written
in place by row number. Rows are written before they are read, and a token sees the rows up to its own position only:
what an earlier text or the padding of a chunk left behind has weight 0 until it is overwritten. A window of attention
is a matter of the mask as well; the cache holds all rows.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from tasks.models.decoder import Block, Decoder
from tasks.models.layers import MASKED, Angles
from tasks.models.rotary import rotary_frequencies, rotary_tables

INPUT_SHAPES: dict[str, tuple[int | None, ...]] = {"input_ids": (1, None), "positions": (None,)}


def input_forms() -> list[Tensor]:
    """The inputs of a `CachedDecoder` with the number of tokens left open, for compiling and exporting one graph."""
    return [Tensor(shape=list(shape), dtype=mstype.int32) for shape in INPUT_SHAPES.values()]


class CachedBlock(nn.Cell):
    """One layer of a decoder, with its part of the cache.

    Args:
        block: the layer; its weights are used, not copied.
        index: its number in the decoder.
        rows: S, positions that the cache holds.
    Inputs:
        x: (1, T, D).
        angles: cosine and sine, (T, 1, C/2) each, at the positions of the T tokens.
        written: (T * K,) int32, the cache rows of the T tokens.
        mask: (T, S).
    Outputs:
        (1, T, D).
    """

    def __init__(self, block: Block, index: int, rows: int) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their Hugging Face names
        attention = block.self_attn
        self.block, self.windowed = block, block.windowed
        self.heads, self.rows, self.head_size = attention.key_value_heads, rows, attention.head_size
        zeros = np.zeros((self.heads * rows, self.head_size), np.float32)
        self.keys = Parameter(Tensor(zeros), name=f"cache.{index}.keys", requires_grad=False)
        self.values = Parameter(Tensor(zeros), name=f"cache.{index}.values", requires_grad=False)
        self.write = ops.ScatterUpdate()

    def construct(self, x: Tensor, angles: Angles, written: Tensor, mask: Tensor) -> Tensor:
        """See the class."""
        attention = self.block.self_attn
        queries, keys, values = attention.project(self.block.input_layernorm(x), angles, angles)
        keys = self.write(self.keys, written, keys.reshape(-1, self.head_size))  # (K * S, C)
        values = self.write(self.values, written, values.reshape(-1, self.head_size))
        keys = keys.reshape(1, self.heads, self.rows, self.head_size)
        values = values.reshape(1, self.heads, self.rows, self.head_size)
        x = x + attention.attend(queries, keys, values, mask)
        return x + self.block.mlp(self.block.post_attention_layernorm(x))


class CachedDecoder(nn.Cell):
    """A decoder that remembers keys and values of the tokens before.

    One graph serves every number of tokens, but each new one costs 0.2 to 0.6 s and memory once (MindSpore 2.7.0, CPU).

    Args:
        decoder: its weights are used, not copied; with or without adapters.
        cache_length: tokens that fit, prompt and answer together.
        prefill_chunk: tokens of a prompt that go through at once; the cache is rounded up to whole chunks, so that the
            padding of the last one has rows, too.
    Inputs:
        input_ids: (1, T) int32.
        positions: (T,) int32, the places of the T tokens in the text, ascending, below the rounded cache length. The
            cache must hold all tokens before them.
    Outputs:
        (T, V) float32, the logits after each of the T tokens.
    """

    def __init__(self, decoder: Decoder, cache_length: int, prefill_chunk: int) -> None:
        super().__init__(auto_prefix=False)
        spec = decoder.spec
        rows = -(-cache_length // prefill_chunk) * prefill_chunk
        cosine, sine = rotary_tables(rows, rotary_frequencies(spec))
        self.decoder = decoder
        blocks = [CachedBlock(block, index, rows) for index, block in enumerate(decoder.model.layers)]
        self.blocks = nn.CellList(blocks, auto_prefix=False)
        self.cosine, self.sine = Tensor(cosine), Tensor(sine)
        self.columns = Tensor(np.arange(rows, dtype=np.int32))
        self.first_rows = Tensor(np.arange(spec.key_value_heads, dtype=np.int32) * rows)  # of each head
        self.vocabulary, self.window = spec.vocabulary, spec.window
        self.set_train(False)
        self.set_inputs(*input_forms())

    def construct(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See the class."""
        cosine = ops.gather(self.cosine, positions, 0).expand_dims(1)  # (T, 1, C/2)
        sine = ops.gather(self.sine, positions, 0).expand_dims(1)
        places = positions.expand_dims(1)  # (T, 1)
        written = (places + self.first_rows).reshape(-1)  # (T * K,)
        mask = (self.columns > places).astype(mstype.float32) * MASKED  # (T, S)
        windowed_mask = mask
        if self.window is not None:
            windowed_mask += (self.columns <= places - self.window).astype(mstype.float32) * MASKED
        x = self.decoder.model.embed_tokens(input_ids)  # (1, T, D)
        for block in self.blocks:
            x = block(x, (cosine, sine), written, windowed_mask if block.windowed else mask)
        logits = self.decoder.logits(self.decoder.model.norm(x))  # (1, T, V)
        return logits.reshape(-1, self.vocabulary)
