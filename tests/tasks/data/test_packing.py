import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.packing import padded_lengths, padded_tokens, place


@given(st.lists(st.integers(1, 40), max_size=60))
def test_every_segment_lies_whole_in_one_row_that_holds_it(lengths):
    rows = place(lengths, 40)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 40 for row in rows)
    assert all(row == sorted(row) for row in rows)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_no_two_rows_would_fit_into_one(lengths):
    filled = sorted(sum(lengths[index] for index in row) for row in place(lengths, 40))
    assert all(first + second > 40 for first, second in itertools.pairwise(filled))


def test_the_fullest_row_with_room_is_taken():
    # 7 leaves 3, 6 leaves 4: the 3 goes to the 7, the 4 to the 6; the 5 opens a row of its own
    assert place([6, 4, 3, 7, 5], 10) == [[2, 3], [0, 1], [4]]


@given(st.dictionaries(st.integers(1, 200), st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_padded_lengths_are_the_best_choice(counts, most):
    found = padded_lengths(counts, most, 200)
    assert list(found) == sorted(set(found))
    assert len(found) <= most
    grid = [*range(32, 200, 32), 200]
    last = next(length for length in grid if length >= max(counts))
    below = [length for length in grid if length < last]
    choices = ((*chosen, last) for size in range(most) for chosen in itertools.combinations(below, size))
    assert padded_tokens(counts, found) == min(padded_tokens(counts, choice) for choice in choices)


@pytest.mark.parametrize(
    ("lengths", "limit", "wanted"),
    [([3, 9], 512, (32,)), ([32], 512, (32,)), ([33, 5], 512, (64,)), ([90], 100, (96,)), ([97], 100, (100,))],
)
def test_one_length_is_that_of_the_longest_row_rounded_up_within_the_limit(lengths, limit, wanted):
    assert padded_lengths(dict.fromkeys(lengths, 1), 1, limit) == wanted


def test_without_rows_there_is_no_length():
    assert padded_lengths({}, 4, 100) == ()
