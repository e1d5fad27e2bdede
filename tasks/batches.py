"""From token rows to micro-batches of a few static shapes.

Owns which rows an optimizer step sees and how they are padded; both are functions of the step alone, so that a resumed
run goes on exactly where it stopped. Knows neither MindSpore nor files: rows come from anything that has the three
methods of `Rows` (tasks/data/shards.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.errors import StageError
from schemas.tables import IGNORE_LABEL
from tasks.data.packing import LENGTH_MULTIPLE, Row

IntArray = npt.NDArray[np.int32]

PAD_ID = 0  # any id of the vocabulary: padding is masked by its segment, never by its id
PAD_SEGMENT = 0


class Rows(Protocol):
    """Rows that are not padded; labels are not shifted."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def lengths(self) -> npt.NDArray[Any]:
        """Tokens in each row: (rows,)."""
        ...

    def row(self, index: int) -> Row:
        """One row."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once.

    Args:
        input_ids: (B, T) int32, padded on the right.
        labels: (B, T) int32, -100 where nothing is trained: in the prompt, in padding, in filler rows.
        segment_ids: (B, T) int32, from 1 in each row; 0 in padding.
        positions: (B, T) int32, from 0 in each segment; 0 in padding.
        places: (N,) int32, where the labels are that the loss counts, those after a segment's first token: indices into
            all B * T positions, ascending; the rest is 0, which is never such a place.
        tokens: tokens that are no padding.
        trained_tokens: labels that the loss counts.
    """

    input_ids: IntArray
    labels: IntArray
    segment_ids: IntArray
    positions: IntArray
    places: IntArray
    tokens: int
    trained_tokens: int


def collate(
    rows: Rows, indices: Sequence[int], batch_size: int, length: int, label_room: int | None = None
) -> MicroBatch:
    """Pad some rows to one micro-batch; missing rows become fillers without labels, which weigh nothing.

    Args:
        rows: where the rows come from.
        indices: rows to take, at most batch_size.
        batch_size: B.
        length: T, at least the longest of the rows.
        label_room: N, at least the labels that the loss counts, see `label_room`; None: as many as positions.

    Raises:
        StageError: a row has no label that the loss could count, so that it would add nothing.
    """
    shape = (batch_size, length)
    padded = Row(
        input_ids=np.full(shape, PAD_ID, np.int32),
        labels=np.full(shape, IGNORE_LABEL, np.int32),
        segment_ids=np.full(shape, PAD_SEGMENT, np.int32),
        positions=np.zeros(shape, np.int32),
    )
    tokens = trained = 0
    places = np.zeros(batch_size * length if label_room is None else label_room, np.int32)
    for place, index in enumerate(indices):
        row = rows.row(index)
        counted = np.flatnonzero((row.labels != IGNORE_LABEL) & (row.positions > 0))
        if len(counted) == 0:
            raise StageError(
                "data.mask_broken",
                stage="train",
                place=f"Row {index} of the token shards",
                problem="no token after its first one has a label",
            )
        for target, column in zip(padded, row, strict=True):
            target[place, : len(column)] = column
        places[trained : trained + len(counted)] = place * length + counted
        tokens += len(row.input_ids)
        trained += len(counted)
    return MicroBatch(*padded, places, tokens, trained)


def label_room(counts: npt.NDArray[np.int64], batch_size: int, length: int) -> int:
    """Labels that there may be in a micro-batch of some rows, whichever come together.

    Args:
        counts: (rows,) labels of each row that the loss counts.
        batch_size: B.
        length: T.

    Returns:
        As many as the rows with the most have together, rounded up to a multiple of 32, at least 1 and at most B * T.
    """
    most = int(np.sort(counts)[::-1][:batch_size].sum())
    return max(1, min(-(-most // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, batch_size * length))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that go through the model together, at most as many as a micro-batch has.

    Args:
        rows: their indices.
        length: tokens that they are padded to.
    """

    rows: tuple[int, ...]
    length: int


class RowOrder:
    """Which rows each optimizer step sees.

    Every epoch is a permutation of all rows, drawn from (seed, epoch) alone. An epoch's last step takes what is left,
    so that no row is dropped and none is seen twice. With several padded lengths the rows of a micro-batch share one:
    the permuted rows are dealt to one micro-batch a length, and what is full goes into the order; at the epoch's end
    those that are not full follow.

    Args:
        lengths: tokens of each training row, at least one row.
        padded_lengths: what rows may be padded to, ascending; the last is at least the longest row.
        batch_size: rows in a micro-batch.
        accumulation: micro-batches in a step, at most.
        seed: seed of the permutations.
    """

    def __init__(
        self,
        lengths: npt.NDArray[Any],
        padded_lengths: Sequence[int],
        batch_size: int,
        accumulation: int,
        seed: int,
    ) -> None:
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._seed = seed
        self._padded_lengths = tuple(padded_lengths)
        self._buckets = np.searchsorted(self._padded_lengths, lengths)  # of each row
        self._batches_per_epoch = int((-(-np.bincount(self._buckets) // batch_size)).sum())
        self._epoch = lru_cache(maxsize=2)(self._draw)  # the present epoch and the next

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the rows."""
        return math.ceil(self._batches_per_epoch / self._accumulation)

    def epoch_after(self, step: int) -> float:
        """Passes over the rows that are done after a step, counted from 1."""
        whole, steps = divmod(step, self.steps_per_epoch)
        seen = self._epoch(whole)[1][steps * self._accumulation - 1] if steps else 0
        return whole + float(seen) / len(self._buckets)

    def micro_batches(self, step: int) -> tuple[Batch, ...]:
        """The micro-batches of one step, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        start = place * self._accumulation
        return self._epoch(epoch)[0][start : start + self._accumulation]

    def _draw(self, epoch: int) -> tuple[tuple[Batch, ...], npt.NDArray[np.int64]]:
        """The micro-batches of an epoch, and the rows seen after each."""
        # Philox is keyed, so every epoch is a stream of its own, and none has to be drawn to reach the next.
        generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        rows = generator.permutation(len(self._buckets))
        batches = tuple(_deal(rows, self._buckets, self._padded_lengths, self._batch_size))
        return batches, np.cumsum([len(batch.rows) for batch in batches])


def in_order(lengths: npt.NDArray[Any], padded_lengths: Sequence[int], batch_size: int) -> tuple[Batch, ...]:
    """All rows once, by micro-batch; in their own order where there is one padded length."""
    buckets = np.searchsorted(padded_lengths, lengths)
    return tuple(_deal(np.arange(len(lengths)), buckets, padded_lengths, batch_size))


def share(batches: Sequence[Batch], rank: int, ranks: int) -> tuple[Batch, ...]:
    """The part of a step's micro-batches that one of several devices does.

    The parts are disjoint and together all of them; where there are too few, some get a micro-batch without rows, so
    that all do the same number.

    Args:
        batches: the micro-batches of a step.
        rank: number of the device, from 0.
        ranks: number of devices.
    """
    fillers = [Batch((), batches[-1].length)] * (-len(batches) % ranks)
    return tuple([*batches, *fillers][rank::ranks])


def _deal(
    rows: npt.NDArray[np.int64], buckets: npt.NDArray[np.int64], padded_lengths: Sequence[int], batch_size: int
) -> Iterator[Batch]:
    """Micro-batches of rows that share a bucket, in the order in which they fill up; then those that are not full."""
    waiting: list[list[int]] = [[] for _ in padded_lengths]
    for row, bucket in zip(rows.tolist(), buckets[rows].tolist(), strict=True):
        waiting[bucket].append(row)
        if len(waiting[bucket]) == batch_size:
            yield Batch(tuple(waiting[bucket]), padded_lengths[bucket])
            waiting[bucket] = []
    yield from (Batch(tuple(left), length) for left, length in zip(waiting, padded_lengths, strict=True) if left)
