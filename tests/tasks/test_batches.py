"""Padding, fillers, and which rows come when."""

from collections import Counter

import numpy as np
import pytest
from list_rows import ListRows

from schemas.errors import StageError
from tasks.batches import Batch, RowOrder, collate, in_order, label_room, share

ROWS = ListRows(
    [([5, 6, 7], [-100, 6, 7])],
    [([8, 0, 0, 9], [-100, -100, 0, 9])],
    [([0, 0], [0, 0])],
    [([1, 2], [-100, 2]), ([3, 4, 5], [3, -100, 5])],
)


def order_of(rows, batch_size, accumulation, seed):
    """An order over rows of one length."""
    return RowOrder(np.full(rows, 7), (32,), batch_size, accumulation, seed)


def rows_of(batches):
    return [batch.rows for batch in batches]


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


def test_places_are_those_of_the_labels_that_count():
    batch = collate(ROWS, (3, 1), batch_size=3, length=6, label_room=5)
    # of the segments (1, 2) and (3, 4, 5): the 2 and the 5, not the 3, which has another text before it
    assert batch.places.tolist() == [1, 4, 6 + 2, 6 + 3, 0]
    assert batch.trained_tokens == 4
    assert len(collate(ROWS, (3, 1), batch_size=3, length=6).places) == 18


def test_there_is_room_for_the_labels_of_any_rows_that_come_together():
    assert label_room(np.array([3, 40, 7, 30]), batch_size=2, length=64) == 96
    assert label_room(np.array([3, 40, 7, 30]), batch_size=1, length=64) == 64
    assert label_room(np.array([63, 60]), batch_size=4, length=64) == 128
    assert label_room(np.array([20, 20]), batch_size=1, length=24) == 24
    assert label_room(np.array([], np.int64), batch_size=4, length=64) == 1


@pytest.mark.parametrize("labels", [[-100, -100, -100], [4, -100, -100]])
def test_a_row_that_would_add_nothing_is_an_error(labels):
    with pytest.raises(StageError, match=r"Row 1 of the token shards would be trained wrongly: no token after its"):
        collate(ListRows([([1, 2], [-100, 2])], [([4, 5, 6], labels)]), (0, 1), batch_size=2, length=4)


def test_segments_are_numbered_and_each_counts_its_positions_from_0():
    batch = collate(ROWS, (3, 0), batch_size=2, length=6)
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 0, 0]]
    assert batch.trained_tokens == 2 + 2  # the label at the second segment's start has another text before it


def test_every_epoch_holds_every_row_once():
    order = order_of(23, 2, 3, seed=1)
    assert order.steps_per_epoch == 4
    for epoch in range(3):
        steps = range(epoch * 4 + 1, epoch * 4 + 5)
        seen = Counter(row for step in steps for batch in order.micro_batches(step) for row in batch.rows)
        assert seen == Counter(range(23))


def test_the_last_step_of_an_epoch_has_what_is_left_and_no_empty_micro_batch():
    order = order_of(23, 2, 3, seed=1)
    assert [len(batch.rows) for batch in order.micro_batches(3)] == [2, 2, 2]
    assert [len(batch.rows) for batch in order.micro_batches(4)] == [2, 2, 1]
    assert [len(batch.rows) for batch in order_of(7, 2, 3, seed=1).micro_batches(2)] == [1]


def test_order_is_a_function_of_seed_and_step_alone():
    late_first = order_of(50, 4, 1, seed=9)
    late = [late_first.micro_batches(step) for step in (30, 2, 17)]
    again = order_of(50, 4, 1, seed=9)
    assert [again.micro_batches(step) for step in (30, 2, 17)] == late
    assert order_of(50, 4, 1, seed=10).micro_batches(2) != late[1]


def test_epochs_are_shuffled_differently():
    order = order_of(50, 50, 1, seed=0)
    assert order.micro_batches(1) != order.micro_batches(2)


def test_accumulation_does_not_change_which_rows_a_step_sees():
    one, many = order_of(21, 6, 1, seed=4), order_of(21, 2, 3, seed=4)
    for step in range(1, 9):
        flat = tuple(row for batch in many.micro_batches(step) for row in batch.rows)
        assert rows_of(one.micro_batches(step)) == [flat]


def test_passes_over_the_rows_count_a_short_last_step_as_what_it_is():
    order = order_of(10, 4, 1, seed=0)
    assert [order.epoch_after(step) for step in (1, 2, 3, 4)] == pytest.approx([0.4, 0.8, 1.0, 1.4])


def test_validation_takes_the_rows_in_their_order():
    assert in_order(np.array([9, 3, 32, 1, 4]), (32,), 2) == (Batch((0, 1), 32), Batch((2, 3), 32), Batch((4,), 32))


def test_rows_of_a_micro_batch_share_the_shortest_length_that_holds_them():
    lengths = np.random.default_rng(3).integers(1, 97, 101)
    order = RowOrder(lengths, (32, 64, 96), batch_size=4, accumulation=3, seed=5)
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)
        batches = [batch for step in steps for batch in order.micro_batches(step)]
        assert Counter(row for batch in batches for row in batch.rows) == Counter(range(101))
        for batch in batches:
            assert (-(-lengths[list(batch.rows)] // 32) * 32 == batch.length).all()
        short = [batch for batch in batches if len(batch.rows) < 4]
        assert batches[len(batches) - len(short) :] == short
        assert len({batch.length for batch in short}) == len(short)
        assert order.epoch_after(steps[-1]) == epoch + 1
    # lengths are mixed over an epoch, not one after the other
    first = [batch.length for step in range(1, 5) for batch in order.micro_batches(step)]
    assert set(first) == {32, 64, 96}


def test_several_lengths_in_their_order():
    batches = in_order(np.array([40, 3, 32, 50, 4]), (32, 64), 2)
    assert batches == (Batch((1, 2), 32), Batch((0, 3), 64), Batch((4,), 32))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_a_step_without_overlap_and_in_equal_numbers(ranks):
    order = RowOrder(np.random.default_rng(1).integers(1, 65, 23), (32, 64), batch_size=2, accumulation=4, seed=2)
    for step in range(1, 2 * order.steps_per_epoch + 1):
        whole = order.micro_batches(step)
        parts = [share(whole, rank, ranks) for rank in range(ranks)]
        assert len({len(part) for part in parts}) == 1
        assert sum(len(batch.rows) for part in parts for batch in part) == sum(len(batch.rows) for batch in whole)
        assert {batch for part in parts for batch in part if batch.rows} == set(whole)
    assert share(order.micro_batches(1), 0, 1) == order.micro_batches(1)
