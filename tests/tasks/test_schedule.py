"""Numbers of steps, and the learning rate at each."""

import math

import pytest

from schemas.config import TrainConfig
from schemas.errors import InputError
from tasks.schedule import learning_rate, total_steps


def rates(steps, **settings):
    train = TrainConfig(learning_rate=1.0, **settings)
    return [learning_rate(step, steps, train) for step in range(1, steps + 1)]


def test_linear_with_warmup():
    assert rates(8, schedule="linear", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_without_warmup_starts_at_the_highest_rate():
    assert rates(4, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_cosine_with_warmup():
    half_wave = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates(5, schedule="cosine", warmup_steps=1) == pytest.approx([0.5, *half_wave])


def test_constant_with_warmup():
    assert rates(4, schedule="constant", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_no_step_has_rate_zero_or_more_than_the_highest(schedule, warmup):
    values = rates(10, schedule=schedule, warmup_steps=warmup)
    assert all(0 < value <= 1 for value in values)
    assert values[warmup] == 1


def test_the_decay_is_that_of_transformers():
    # Written from the documentation of get_linear_ and get_cosine_schedule_with_warmup; their steps count from 0.
    steps, warmup = 20, 4
    linear, cosine = (rates(steps, schedule=name, warmup_steps=warmup) for name in ("linear", "cosine"))
    for index in range(warmup, steps):
        share_done = (index - warmup) / (steps - warmup)
        assert linear[index] == pytest.approx(max(0.0, (steps - index) / (steps - warmup)))
        assert cosine[index] == pytest.approx(max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * share_done))))


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "wanted"), [(3, 7, 21), (0.5, 7, 4), (0.1, 30, 3), (2.1, 10, 21), (0.001, 10, 1)]
)
def test_epochs_are_rounded_up_to_whole_steps(epochs, per_epoch, wanted):
    assert total_steps(TrainConfig(epochs=epochs), per_epoch, rows=1) == wanted


def test_max_steps_wins_over_epochs():
    assert total_steps(TrainConfig(epochs=5, max_steps=3), 100, rows=1) == 3


def test_a_warmup_that_never_ends_is_refused():
    with pytest.raises(InputError, match=r"warmup_steps \(10\) must be below the number of steps \(10, from 40 rows"):
        total_steps(TrainConfig(epochs=1, warmup_steps=10), 10, rows=40)
