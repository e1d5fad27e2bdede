"""From token rows to micro-batches of one static shape.

Owns which rows an optimizer step sees and how they are padded; both are functions of the step alone, so that a resumed
run goes on exactly where it stopped. Knows neither MindSpore nor files: rows come from anything that has the three
methods of `Rows` (tasks/data/shards.py).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.errors import InputError, StageError
from schemas.tables import IGNORE_LABEL

IntArray = npt.NDArray[np.int32]

LENGTH_MULTIPLE = 32  # tokens; coarse enough that a few more rows seldom ask for another graph
PAD_ID = 0  # any id of the vocabulary: padding is masked by its position, never by its id


class Rows(Protocol):
    """Rows of token ids and labels that are not padded; labels are not shifted."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def lengths(self) -> npt.NDArray[Any]:
        """Tokens in each row: (rows,)."""
        ...

    def row(self, index: int) -> tuple[IntArray, IntArray]:
        """Token ids and labels of one row: (T,) and (T,)."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once.

    Args:
        input_ids: (B, T) int32, padded on the right.
        labels: (B, T) int32, -100 where nothing is trained: in the prompt, in padding, in filler rows.
        tokens: tokens that are no padding.
        trained_tokens: labels that the loss counts, those after a row's first token.
    """

    input_ids: IntArray
    labels: IntArray
    tokens: int
    trained_tokens: int


def padded_length(lengths: Iterable[int], positions: int) -> int:
    """The one length that all rows of a run are padded to, tokens.

    The longest row, rounded up to a multiple of 32: one shape means one compiled graph.

    Args:
        lengths: tokens of every row that will be seen, at least one.
        positions: positions of the base model, which the rounding must not exceed.

    Raises:
        InputError: the longest row has more tokens than the model has positions.
    """
    longest = max(int(length) for length in lengths)
    if longest > positions:
        raise InputError("model.too_short", field="tokenize.max_length", value=longest, positions=positions)
    return min(math.ceil(longest / LENGTH_MULTIPLE) * LENGTH_MULTIPLE, positions)


def collate(rows: Rows, indices: Sequence[int], batch_size: int, length: int) -> MicroBatch:
    """Pad some rows to one micro-batch; missing rows become fillers without labels, which weigh nothing.

    Args:
        rows: where the rows come from.
        indices: rows to take, at most batch_size.
        batch_size: B.
        length: T, at least the longest of the rows.

    Raises:
        StageError: a row has no label that the loss could count, so that it would add nothing.
    """
    input_ids = np.full((batch_size, length), PAD_ID, dtype=np.int32)
    labels = np.full((batch_size, length), IGNORE_LABEL, dtype=np.int32)
    tokens = trained = 0
    for place, index in enumerate(indices):
        row_ids, row_labels = rows.row(index)
        counted = int(np.count_nonzero(row_labels[1:] != IGNORE_LABEL))
        if counted == 0:
            raise StageError(
                "data.mask_broken",
                stage="train",
                place=f"Row {index} of the token shards",
                problem="no token after its first one has a label",
            )
        input_ids[place, : len(row_ids)] = row_ids
        labels[place, : len(row_labels)] = row_labels
        tokens += len(row_ids)
        trained += counted
    return MicroBatch(input_ids, labels, tokens, trained)


@dataclass(frozen=True)
class RowOrder:
    """Which rows each optimizer step sees.

    Every epoch is a permutation of all rows, drawn from (seed, epoch) alone. An epoch's last step takes what is left,
    so that no row is dropped and none is seen twice.

    Args:
        rows: number of training rows, at least 1.
        batch_size: rows in a micro-batch.
        accumulation: micro-batches in a step, at most.
        seed: seed of the permutations.
    """

    rows: int
    batch_size: int
    accumulation: int
    seed: int

    @property
    def rows_per_step(self) -> int:
        """Rows in a step that is not the last of its epoch."""
        return self.batch_size * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the rows."""
        return math.ceil(self.rows / self.rows_per_step)

    def epoch_after(self, step: int) -> float:
        """Passes over the rows that are done after a step, counted from 1."""
        whole, steps = divmod(step, self.steps_per_epoch)
        return whole + steps * self.rows_per_step / self.rows

    def micro_batches(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The rows of one step, counted from 1, by micro-batch."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        start = place * self.rows_per_step
        chosen = _permutation(self.rows, self.seed, epoch)[start : start + self.rows_per_step]
        return tuple(_cut(chosen.tolist(), self.batch_size))


def in_order(rows: int, batch_size: int) -> Iterator[tuple[int, ...]]:
    """All rows once, in their own order, by micro-batch."""
    return _cut(range(rows), batch_size)


def _cut(indices: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(indices[start : start + size]) for start in range(0, len(indices), size))


@lru_cache(maxsize=2)  # the present epoch and the next
def _permutation(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Philox is keyed, so every epoch is a stream of its own, and none has to be drawn to reach the next.
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(rows)
