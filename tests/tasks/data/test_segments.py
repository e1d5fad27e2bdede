import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from segments_from import join

from tasks.data.segments import Segments, concatenate

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def made(rows: list[list[int]]) -> Segments:
    return join(rows, [[-100, *row[1:]][: len(row)] for row in rows], [(7, number) for number in range(len(rows))])


def as_lists(segments: Segments) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (segments.ids[a:b].tolist(), segments.labels[a:b].tolist(), origin.tolist())
        for a, b, origin in zip(segments.starts, segments.starts[1:], segments.origins, strict=False)
    ]


@given(ROWS, st.data())
def test_slices_orders_and_parts_are_those_of_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    segments, wanted = made(rows), as_lists(made(rows))
    assert [ids for ids, _, _ in wanted] == rows
    assert segments.lengths.tolist() == list(map(len, rows))
    first, end = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    assert as_lists(segments[first:end]) == wanted[first:end]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    assert as_lists(segments.take(order)) == [wanted[index] for index in order]
    assert as_lists(concatenate([segments[:first], segments[first:]])) == wanted
    assert as_lists(pickle.loads(pickle.dumps(segments))) == wanted


def test_a_slice_copies_nothing() -> None:
    segments = made([[1, 2], [3], [4, 5]])
    assert np.shares_memory(segments[1:].ids, segments.ids)


def test_the_types_are_those_of_the_shards() -> None:
    for segments in (made([]), made([[1, 2]]), made([[1], [2, 3]]).take([1]), concatenate([made([]), made([[1]])])):
        assert (segments.ids.dtype, segments.labels.dtype) == (np.int32, np.int32)
        assert segments.starts[0] == 0
        assert segments.starts[-1] == len(segments.ids)
        assert segments.origins.shape == (len(segments), 2)
