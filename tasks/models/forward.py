"""The whole forward pass without a cache: the reference that merged weights and cached graphs are held against."""

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from tasks.models.decoder import Decoder

PROBE_SEED = 20_260_101  # any fixed number: the same probes for every model of a vocabulary


class ForwardPass(nn.Cell):
    """Logits of a decoder at chosen positions.

    Inputs:
        input_ids: (B, T) int32.
        positions: (N,) int32, below T.
    Outputs:
        (B, N, V) float32.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their Hugging Face names
        self.decoder = decoder

    def construct(self, input_ids: ms.Tensor, positions: ms.Tensor) -> ms.Tensor:
        """Hidden states of all tokens, logits of the chosen ones."""
        hidden = self.decoder(input_ids)  # (B, T, D)
        return self.decoder.logits(ops.gather(hidden, positions, 1))  # (B, N, V)


def logits_at(decoder: Decoder, ids: NDArray[np.int32], positions: Sequence[int]) -> NDArray[np.float32]:
    """Logits (B, N, V) of texts (B, T) after the tokens at N positions."""
    cell = ForwardPass(decoder).set_train(False)
    logits: NDArray[np.float32] = cell(ms.Tensor(ids), ms.Tensor(np.array(positions, np.int32))).asnumpy()
    return logits


def probe_ids(vocabulary: int, rows: int, length: int) -> NDArray[np.int32]:
    """Token ids (rows, length) to try a model with; the same for the same arguments on every machine."""
    random = np.random.Generator(np.random.Philox(PROBE_SEED))
    return random.integers(0, vocabulary, (rows, length), dtype=np.int32)
