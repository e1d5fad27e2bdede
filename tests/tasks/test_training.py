"""The loop around the step: what is validated, saved, kept and refused, and that stopping changes nothing.

The step is a stand-in in plain NumPy, so that every course of losses can be set up; the real one has tests of its own.
"""

import math

import numpy as np
import pytest

from schemas.errors import StageError
from tasks import training
from tasks.batches import MicroBatch
from tasks.checkpoints import Checkpoints
from tasks.stages import StageContext
from tasks.training import Course, Training

BATCH = MicroBatch(*[np.zeros((1, 2), np.int32)] * 5, tokens=2, trained_tokens=1)


class Weight:
    name = "w"


class FakeStep:
    """A weight that is halved and pushed by the step's number; its distance from 1 is the loss."""

    def __init__(self, losses=None, norms=None, validation=None, frozen=False):
        self.weights = [Weight()]
        self.values = {"w": np.array([4.0]), "first_moment.w": np.array([0.0])}
        self.losses, self.norms, self.validation, self.frozen = losses or {}, norms or {}, validation, frozen
        self.done = []

    def compile(self, batch):
        assert batch is BATCH

    def __call__(self, batches, step, learning_rate):
        assert list(batches) == [BATCH]
        self.done.append(step)
        if not self.frozen:
            self.values["w"] = self.values["w"] * 0.5 + learning_rate / step
        self.values["first_moment.w"] = self.values["first_moment.w"] + step
        return self.losses.get(step, abs(self.values["w"][0] - 1)), self.norms.get(step, 0.5)

    def mean_loss(self, batches):
        assert len(list(batches)) == 2
        if self.validation is not None:
            return self.validation[int(self.values["first_moment.w"][0])]
        return float(self.values["w"][0])

    def state(self):
        return {name: array.copy() for name, array in self.values.items()}

    def restore(self, state):
        self.values = {name: array.copy() for name, array in state.items()}


def sum_to(step):
    """What the moment of FakeStep holds after a step: it tells the step from the state."""
    return step * (step + 1) // 2


@pytest.fixture
def start(tmp_path):
    """A function that makes a training of 10 steps; the same checkpoint folder each time."""

    def make(step, *, stop=lambda: False, report=lambda done, total, text: None, keep=3, **changes):
        course = {
            "steps": 10,
            "micro_batches": lambda number: [BATCH],
            "shapes": [BATCH],
            "validation": lambda: [BATCH, BATCH],
            "learning_rate": lambda number: 0.1 * number,
            "epoch_after": lambda number: number / 5,
            "validate_every": 4,
            "log_every": 3,
            "checkpoint_every": 2,
        } | changes
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
        return Training(step, Course(**course), checkpoints, StageContext(report, stop))

    return make


def saved_steps(tmp_path):
    return sorted(int(path.stem.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("*.safetensors"))


def test_validates_before_the_first_step_every_so_often_and_after_the_last(start):
    outcome = start(FakeStep()).run()
    assert [point.step for point in outcome.progress.validation] == [0, 4, 8, 10]
    assert outcome.progress.validation[0].loss == 4.0


def test_a_validation_that_falls_on_the_last_step_is_done_once(start):
    outcome = start(FakeStep(), validate_every=5).run()
    assert [point.step for point in outcome.progress.validation] == [0, 5, 10]


@pytest.mark.parametrize("log_every", [1, 7, 100])
def test_curve_holds_every_step_whatever_is_logged(start, log_every):
    curve = start(FakeStep(), log_every=log_every).run().progress.curve
    assert [point.step for point in curve] == list(range(1, 11))
    assert curve[4].epoch == 1.0
    assert curve[4].learning_rate == pytest.approx(0.5)
    assert curve[4].gradient_norm == 0.5


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({0: 9.0, 4: 2.0, 8: 1.0, 10: 3.0}, 8),
        ({0: 9.0, 4: 1.0, 8: 1.0, 10: 1.0}, 4),  # equal: the earlier
        ({0: 0.5, 4: 3.0, 8: 2.0, 10: 1.0}, 10),  # the base model is no result of training
    ],
)
def test_best_is_the_lowest_validation_after_step_0(start, losses, best):
    step = FakeStep(validation={sum_to(number): loss for number, loss in losses.items()})
    outcome = start(step).run()
    assert outcome.progress.best_step == best
    assert outcome.best["first_moment.w"][0] == sum_to(best)
    assert outcome.last["first_moment.w"][0] == sum_to(10)


def test_newest_checkpoints_are_kept_and_the_last_step_is_among_them(start, tmp_path):
    start(FakeStep(), checkpoint_every=3, keep=2).run()
    assert saved_steps(tmp_path) == [9, 10]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_its_own_step_and_is_not_saved(start, tmp_path, value):
    step = FakeStep(losses={7: value, 8: value, 9: value})
    with pytest.raises(StageError, match=rf"The loss of step 7 is {value}"):
        start(step, log_every=100, validate_every=100, checkpoint_every=3).run()
    assert saved_steps(tmp_path) == [3, 6]
    assert step.done[-1] == 9  # nothing waits for the device between checkpoints


def test_a_gradient_norm_that_is_not_finite_is_an_error(start):
    with pytest.raises(StageError, match=r"The gradient norm of step 2 is inf"):
        start(FakeStep(norms={2: math.inf})).run()


def test_a_validation_loss_that_is_not_finite_is_an_error(start, tmp_path):
    step = FakeStep(validation={0: 1.0, sum_to(4): math.nan})
    with pytest.raises(StageError, match=r"The validation loss of step 4 is nan"):
        start(step).run()
    assert saved_steps(tmp_path) == [2]


def test_a_first_step_that_changes_no_weight_is_an_error(start):
    with pytest.raises(StageError, match=r"optimizer step 1 left every trainable weight unchanged"):
        start(FakeStep(frozen=True)).run()


@pytest.mark.parametrize("polls", range(1, 19))
def test_a_stopped_training_goes_on_to_the_same_end(start, tmp_path, polls):
    straight = start(FakeStep()).run()
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    asked = 0

    def stop():
        nonlocal asked
        asked += 1
        return asked == polls

    first = FakeStep()
    with pytest.raises(StageError, match=r"stopped by a signal after step (\d+); a checkpoint is kept"):
        start(first, stop=stop).run()
    second = FakeStep()
    outcome = start(second).run()
    assert first.done + second.done == list(range(1, 11))  # no step twice, none left out
    assert outcome.progress == straight.progress
    assert outcome.timings.resumed_from_step == len(first.done)
    for name, array in straight.last.items():
        assert np.array_equal(outcome.last[name], array)
        assert np.array_equal(outcome.best[name], straight.best[name])


def test_a_damaged_checkpoint_is_passed_over_and_named(start, tmp_path, caplog):
    straight = start(FakeStep()).run()
    newest = tmp_path / "checkpoints" / "step-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    second = FakeStep()
    outcome = start(second).run()
    assert "step-00000010.safetensors can't be used" in caplog.text
    assert second.done == [9, 10]
    assert outcome.progress == straight.progress


def test_a_finished_training_that_was_not_published_is_not_done_again(start):
    straight = start(FakeStep()).run()
    second = FakeStep()
    outcome = start(second).run()
    assert second.done == []
    assert outcome.progress == straight.progress
    assert np.array_equal(outcome.last["w"], straight.last["w"])


def test_progress_is_reported_for_each_step_with_the_loss_last_read(start):
    reports = []
    start(FakeStep(losses={3: 2.5}), report=lambda *report: reports.append(report)).run()
    assert reports[0] == (0, 10, "compiling graph 1 of 1")
    assert [report[:2] for report in reports[1:]] == [(step, 10) for step in range(1, 11)]
    assert reports[3][2] == reports[4][2] == "loss 2.500"


def test_log_lines_say_step_loss_rate_norm_speed_and_time_left(start, caplog):
    caplog.set_level("INFO", logger="mindtune.training")
    start(FakeStep(losses={3: 2.5})).run()
    (line,) = [record.message for record in caplog.records if "step 3/10" in record.message]
    assert line.startswith("step 3/10: loss 2.5000, learning rate 3.00e-01, gradient norm 0.500, ")
    assert line.endswith("trained tokens/s, 0:00:00 left")


def test_steps_left_out_are_counted_and_not_on_the_curve(start, caplog):
    caplog.set_level("INFO", logger="mindtune.training")
    bad = {1: math.inf, 2: math.nan, 6: math.inf}
    step = FakeStep(norms=bad, losses={6: math.nan})
    outcome = start(step, may_skip=True).run()
    assert outcome.progress.skipped == (1, 2, 6)
    assert [point.step for point in outcome.progress.curve] == [3, 4, 5, 7, 8, 9, 10]
    assert "step 6 is left out" in caplog.text


def test_too_many_steps_left_out_in_a_row_are_an_error_that_names_them(start, monkeypatch):
    monkeypatch.setattr(training, "MOST_SKIPPED", 3)
    with pytest.raises(StageError, match=r"gradients of 4 steps \(the first 2, the last 7\) were not finite"):
        start(FakeStep(norms=dict.fromkeys((2, 5, 6, 7), math.inf)), may_skip=True).run()


def test_a_training_without_a_good_step_is_an_error(start):
    with pytest.raises(StageError, match=r"gradients of 10 steps \(the first 1, the last 10\)"):
        start(FakeStep(norms=dict.fromkeys(range(1, 11), math.nan)), may_skip=True).run()
