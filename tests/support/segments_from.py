"""Segments made of lists."""

from collections.abc import Sequence

import numpy as np

from tasks.data.segments import Segments


def join(
    ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], origins: Sequence[tuple[int, int]] | None = None
) -> Segments:
    """Segments of rows that hold one record each."""
    assert list(map(len, ids)) == list(map(len, labels))
    flat = [np.array([token for row in rows for token in row], np.int32) for rows in (ids, labels)]
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    found = np.full((len(ids), 2), -1) if origins is None else np.array(origins, np.int64).reshape(-1, 2)
    return Segments(flat[0], flat[1], starts, found)
