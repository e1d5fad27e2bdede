"""Dropout whose mask is a function of (seed, draw, layer), so that a training that goes on from a checkpoint is exact.

MindSpore's nn.Dropout draws from a state inside its kernel, which can be neither read nor set: a resumed training
would see other masks than an undisturbed one. Here nothing is kept between two calls but a number that the caller sets.
"""

import hashlib

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from numpy.typing import NDArray

KEY_NAME = "dropout_key"
ROW_SEED = 0x6D696E64  # any fixed number: the rows' factors, the same in every layer


def odd_numbers(seed: int | list[int], count: int) -> NDArray[np.int32]:
    """Random odd numbers (count,), uniform over all odd int32."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    return (random.integers(0, 2**32, count, dtype=np.uint32) | 1).view(np.int32)


def _factors(rows: int) -> Tensor:
    """The factor of each row (rows, 1), made once when a graph is compiled."""
    return Tensor(odd_numbers(ROW_SEED, rows).reshape(-1, 1))


_row_factors = ops.constexpr(_factors)


class KeyedDropout(nn.Cell):
    """Set a share of the inputs to zero while training, and let the others grow so that the mean stays.

    Element (i, j) is dropped where row_i * key * column_j, wrapped to 32 bits, is in the lowest share of int32. All
    three factors are random odd numbers, so that products in one row, in one column, or of two draws are independent
    of each other. This takes four elementwise operations, and a third less time than nn.Dropout on a CPU. That int32
    products wrap around is tested on the CPU; on Ascend it has not been shown.

    Args:
        share: what is dropped, above 0 and below 1.
        layer: name of the layer; layers have masks of their own.
        width: columns of the input.
        key: () the factor of this draw, shared by all layers; see `draw_masks`.
    Inputs:
        x: (rows, width).
    Outputs:
        (rows, width); x itself outside of training.
    Source: Srivastava et al. 2014, JMLR 15, section 4, scaled in training instead of afterwards.
    """

    def __init__(self, share: float, *, layer: str, width: int, key: Parameter) -> None:
        super().__init__()
        name = np.frombuffer(hashlib.sha256(layer.encode()).digest(), np.uint32)
        self.columns = Tensor(odd_numbers(name.tolist(), width))
        self.key = key
        self.lowest_kept = int(-(2**31) + share * 2**32)
        self.growth = 1 / (1 - share)

    def construct(self, x: Tensor) -> Tensor:
        """See the class."""
        if not self.training:
            return x
        product = (_row_factors(x.shape[0]) * self.key) * self.columns  # (rows, width), wraps around
        kept = ops.cast(product >= self.lowest_kept, x.dtype)
        return x * (kept * self.growth)


def new_key() -> Parameter:
    """A key to share between the KeyedDropouts of a network."""
    return Parameter(Tensor(1, mstype.int32), name=KEY_NAME, requires_grad=False)


def draw_masks(network: nn.Cell, seed: int, draw: int) -> None:
    """Choose the masks of the next forward passes of a network; without KeyedDropout in it nothing happens.

    Args:
        network: whose masks are chosen.
        seed: of the training.
        draw: number of the forward pass, for example of the micro-batch since the start.
    """
    key = Tensor(odd_numbers([seed, draw], 1)[0])
    for _, cell in network.cells_and_names():
        if isinstance(cell, KeyedDropout):
            cell.key.set_data(key)
            return  # all share it
