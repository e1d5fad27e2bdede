"""Packing: several records after each other in one row, so that hardly any position goes to padding.

    input_ids     a1 a2 a3  b1 b2 b3 b4  c1 c2
    segment_ids    1  1  1   2  2  2  2   3  3
    positions      0  1  2   0  1  2  3   0  1

No record is split over rows. The model keeps the segments apart by their ids (tasks/models/decoder.py), so that packing
changes neither the loss nor its gradients. Buckets are the other way to save padding: rows of one record each, padded
to one of a few lengths. Plain NumPy, no files.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tasks.data.segments import IntArray

LENGTH_MULTIPLE = 32  # tokens; coarse enough that a few more rows seldom ask for another graph


class Row(NamedTuple):
    """One row of the table TOKENS: (T,) int32 each, not padded."""

    input_ids: IntArray
    labels: IntArray
    segment_ids: IntArray
    positions: IntArray


def place(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which segments share a row: best fit, longest first.

    Each segment goes into the fullest row that still has room for it, else into a new one. A function of the lengths
    and their order alone.

    Args:
        lengths: tokens of each segment, each at most `room`.
        room: tokens of a row.

    Returns:
        For each row the indices of its segments, ascending.
    Source: Johnson 1973, Near-optimal bin packing algorithms: at most 11/9 of the fewest rows possible, plus a few.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        found = bisect_left(space, (length, 0))
        if found == len(space):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = space.pop(found)
        rows[row].append(index)
        if left > length:
            insort(space, (left - length, row))
    return [sorted(row) for row in rows]


def padded_lengths(counts: Mapping[int, int], most: int, limit: int) -> tuple[int, ...]:
    """The lengths that rows are padded to, chosen so that as few positions as possible are padding.

    Args:
        counts: number of rows by their tokens.
        most: lengths wanted, at most; each is a graph that has to be compiled.
        limit: tokens that no row has more of, and that none is to be padded beyond.

    Returns:
        Ascending multiples of 32, or the limit; fewer than `most` where more would save nothing; none without rows.
    """
    rounded: Counter[int] = Counter()
    for length, rows in counts.items():
        rounded[min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, limit)] += rows
    used = np.array(sorted(rounded), np.int64)
    before = np.append(0.0, np.cumsum([rounded[length] for length in used.tolist()]))  # rows of the first k of them
    cost = np.append(0.0, np.full(len(used), np.inf))  # positions of the first k, in the buckets so far
    cuts = []  # of each further bucket: where it begins if it ends at k
    for _ in range(min(most, len(used))):
        totals = [cost[:k] + (before[k] - before[:k]) * used[k - 1] for k in range(1, len(cost))]
        cuts.append([0, *(int(np.argmin(total)) for total in totals)])
        cost = np.array([0.0, *(total.min() for total in totals)])
    chosen = []
    end = len(used)
    while end:
        chosen.append(int(used[end - 1]))
        end = cuts.pop()[end]
    return tuple(reversed(chosen))


def padded_tokens(counts: Mapping[int, int], lengths: Sequence[int]) -> int:
    """Tokens of all rows together, each padded to the first length that holds it.

    Args:
        counts: number of rows by their tokens.
        lengths: ascending; the last is at least the longest row.
    """
    return sum(rows * lengths[bisect_left(lengths, length)] for length, rows in counts.items())
