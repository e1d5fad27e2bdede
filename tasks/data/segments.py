"""Segments: rows of one record each, after each other in flat arrays, so that many are handled at once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """S segments of N tokens together; a sequence of them can be sliced.

    Args:
        ids: (N,) token ids.
        labels: (N,), not shifted.
        starts: (S + 1,) where each segment begins, and N.
        origins: (S, 2) index of the data file that each comes from, and of the record in it; -1: not known.
    """

    ids: IntArray
    labels: IntArray
    starts: LongArray
    origins: LongArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, place: slice) -> "Segments":
        """Some neighbouring segments, as views."""
        first, end, _ = place.indices(len(self))
        start, starts = self.starts[first], self.starts[first : end + 1]
        tokens = slice(start, starts[-1])
        return Segments(self.ids[tokens], self.labels[tokens], starts - start, self.origins[first:end])

    @property
    def lengths(self) -> LongArray:
        """(S,) tokens of each."""
        return np.diff(self.starts)

    def take(self, order: npt.ArrayLike) -> "Segments":
        """The segments of some indices, in the order of those; one may be named more than once."""
        chosen = np.asarray(order, np.int64)
        lengths = self.lengths[chosen]
        starts = _starts(lengths)
        tokens = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], lengths)
        return Segments(self.ids[tokens], self.labels[tokens], starts, self.origins[chosen])


def join(
    ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], origins: Sequence[tuple[int, int]] | None = None
) -> Segments:
    """Segments of rows that hold one record each.

    Raises:
        ValueError: a row has not as many labels as ids.
    """
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    if list(map(len, labels)) != lengths.tolist():
        raise ValueError("rows must have as many labels as ids")
    starts = _starts(lengths)
    flat = [np.fromiter(itertools.chain.from_iterable(each), np.int32, int(starts[-1])) for each in (ids, labels)]
    found = np.full((len(ids), 2), -1) if origins is None else np.array(origins, np.int64).reshape(-1, 2)
    return Segments(flat[0], flat[1], starts, found)


def concatenate(parts: Sequence[Segments]) -> Segments:
    """Segments after each other; at least one part."""
    return Segments(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
        _starts(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.origins for part in parts]),
    )


def _starts(lengths: LongArray) -> LongArray:
    return np.append(0, np.cumsum(lengths))
