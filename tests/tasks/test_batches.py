"""Padding, fillers, and which rows come when."""

from collections import Counter

import numpy as np
import pytest

from schemas.errors import InputError, StageError
from tasks.batches import RowOrder, collate, in_order, padded_length


class ListRows:
    """Rows from lists of (ids, labels)."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def lengths(self):
        return np.array([len(ids) for ids, _ in self.rows])

    def row(self, index):
        ids, labels = self.rows[index]
        return np.array(ids, np.int32), np.array(labels, np.int32)


ROWS = ListRows([([5, 6, 7], [-100, 6, 7]), ([8, 0, 0, 9], [-100, -100, 0, 9]), ([0, 0], [0, 0])])


def test_rows_are_padded_on_the_right_and_masked_by_position():
    batch = collate(ROWS, (0, 1), batch_size=2, length=5)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 0], [8, 0, 0, 9, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100, -100], [-100, -100, 0, 9, -100]]
    assert batch.input_ids.dtype == batch.labels.dtype == np.int32
    assert (batch.tokens, batch.trained_tokens) == (7, 4)


def test_missing_rows_become_fillers_without_labels():
    batch = collate(ROWS, (2,), batch_size=3, length=4)
    assert batch.labels.tolist() == [[0, 0, -100, -100], [-100] * 4, [-100] * 4]
    assert (batch.tokens, batch.trained_tokens) == (2, 1)  # the first token's label has nothing before it


@pytest.mark.parametrize("labels", [[-100, -100, -100], [4, -100, -100]])
def test_a_row_that_would_add_nothing_is_an_error(labels):
    with pytest.raises(StageError, match=r"Row 1 of the token shards would be trained wrongly: no token after its"):
        collate(ListRows([([1, 2], [-100, 2]), ([4, 5, 6], labels)]), (0, 1), batch_size=2, length=4)


@pytest.mark.parametrize(
    ("lengths", "positions", "wanted"),
    [([3, 9], 512, 32), ([32], 512, 32), ([33, 5], 512, 64), ([90], 100, 96), ([97], 100, 100), ([100], 100, 100)],
)
def test_the_one_length_is_the_longest_rounded_up_within_the_positions(lengths, positions, wanted):
    assert padded_length(lengths, positions) == wanted


def test_a_row_beyond_the_positions_is_refused():
    with pytest.raises(InputError, match=r"tokenize.max_length \(101\) is more than the 100 positions"):
        padded_length([101], 100)


def test_every_epoch_holds_every_row_once():
    order = RowOrder(rows=23, batch_size=2, accumulation=3, seed=1)
    assert order.steps_per_epoch == 4
    for epoch in range(3):
        steps = range(epoch * 4 + 1, epoch * 4 + 5)
        seen = Counter(row for step in steps for batch in order.micro_batches(step) for row in batch)
        assert seen == Counter(range(23))


def test_the_last_step_of_an_epoch_has_what_is_left_and_no_empty_micro_batch():
    order = RowOrder(rows=23, batch_size=2, accumulation=3, seed=1)
    assert [len(batch) for batch in order.micro_batches(3)] == [2, 2, 2]
    assert [len(batch) for batch in order.micro_batches(4)] == [2, 2, 1]
    assert [len(batch) for batch in RowOrder(7, 2, 3, seed=1).micro_batches(2)] == [1]


def test_order_is_a_function_of_seed_and_step_alone():
    late_first = RowOrder(rows=50, batch_size=4, accumulation=1, seed=9)
    late = [late_first.micro_batches(step) for step in (30, 2, 17)]
    again = RowOrder(rows=50, batch_size=4, accumulation=1, seed=9)
    assert [again.micro_batches(step) for step in (30, 2, 17)] == late
    assert RowOrder(rows=50, batch_size=4, accumulation=1, seed=10).micro_batches(2) != late[1]


def test_epochs_are_shuffled_differently():
    order = RowOrder(rows=50, batch_size=50, accumulation=1, seed=0)
    assert order.micro_batches(1) != order.micro_batches(2)


def test_accumulation_does_not_change_which_rows_a_step_sees():
    one, many = RowOrder(21, 6, 1, seed=4), RowOrder(21, 2, 3, seed=4)
    for step in range(1, 9):
        flat = tuple(row for batch in many.micro_batches(step) for row in batch)
        assert one.micro_batches(step) == (flat,)


def test_passes_over_the_rows_count_a_short_last_step_as_what_it_is():
    order = RowOrder(rows=10, batch_size=4, accumulation=1, seed=0)
    assert [order.epoch_after(step) for step in (1, 2, 3, 4)] == pytest.approx([0.4, 0.8, 1.0, 1.4])


def test_validation_takes_the_rows_in_their_order():
    assert list(in_order(5, 2)) == [(0, 1), (2, 3), (4,)]
