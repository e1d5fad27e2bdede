"""Times of steps, on a clock that the test turns."""

import pytest

from tasks import step_clock
from tasks.step_clock import StepClock


@pytest.fixture
def now(monkeypatch):
    """A list whose only element is the time in seconds."""
    seconds = [100.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: seconds[0])
    return seconds


def spend(clock, now, seconds):
    with clock.running():
        now[0] += seconds


def test_only_the_time_of_steps_counts(now):
    clock = StepClock()
    spend(clock, now, 2.0)
    clock.count(tokens=30)
    now[0] += 50.0  # a validation
    spend(clock, now, 4.0)
    clock.count(tokens=30)
    clock.lap()
    assert clock.seconds_per_step == 3.0
    assert clock.tokens_per_second == 10.0


def test_a_step_ends_when_it_is_read_so_the_median_is_over_laps(now):
    clock = StepClock()
    for steps, seconds in ((1, 9.0), (4, 4.0), (2, 4.0)):  # 9, 1 and 2 seconds a step
        for _ in range(steps):
            clock.count(tokens=1)
        spend(clock, now, seconds)
        clock.lap()
    assert clock.median_step_seconds == 2.0
    assert clock.seconds_per_step == 17.0 / 7


def test_nothing_is_divided_by_nothing():
    clock = StepClock()
    clock.lap()
    assert (clock.seconds_per_step, clock.median_step_seconds, clock.tokens_per_second) == (0.0, 0.0, 0.0)
