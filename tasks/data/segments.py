"""Segments: rows of one record each, after each other in flat arrays, so that many are handled at once."""

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
