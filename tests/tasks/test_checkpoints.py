"""Checkpoint files: exact, whole or refused with the reason."""

import numpy as np
import pytest

from schemas.reports import CurvePoint, ValidationPoint
from tasks.checkpoints import Checkpoint, Checkpoints, Progress

SHAPES = {"a": (2, 3), "b": ()}


def make(step, best_step=1):
    draw = np.random.default_rng(step)
    tensors = {"a": draw.normal(size=(2, 3)).astype(np.float32), "b": np.array(step, np.float32)}
    # one third and the like: numbers that must survive as text bit for bit
    curve = tuple(
        CurvePoint(step=k, epoch=k / 3, loss=float(np.float32(1 / k)), learning_rate=1e-4 / k, gradient_norm=k / 7)
        for k in range(1, step + 1)
    )
    progress = Progress(
        step=step, curve=curve, validation=(ValidationPoint(step=0, loss=0.1 + 0.2),), best_step=best_step
    )
    return Checkpoint(progress, tensors, {} if best_step is None else {k: v + 1 for k, v in tensors.items()})


@pytest.mark.parametrize("best_step", [1, None])
def test_what_is_read_is_what_was_saved(tmp_path, best_step):
    checkpoints = Checkpoints(tmp_path, keep=1)
    saved = make(4, best_step)
    checkpoints.save(saved)
    found = checkpoints.newest(SHAPES)
    assert found.progress == saved.progress
    assert found.best.keys() == saved.best.keys()
    for part, wanted in ((found.now, saved.now), (found.best, saved.best)):
        for name, array in wanted.items():
            assert part[name].dtype == array.dtype
            assert np.array_equal(part[name], array)


def test_the_newest_is_by_step_not_by_time(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (100, 20, 3):
        checkpoints.save(make(step))
    assert checkpoints.newest(SHAPES).progress.step == 100


def test_nothing_is_found_in_a_new_folder(tmp_path):
    assert Checkpoints(tmp_path / "new", keep=1).newest(SHAPES) is None


def test_leftovers_of_a_kill_are_removed(tmp_path):
    Checkpoints(tmp_path, keep=1).save(make(3))
    (tmp_path / ".step-00000004.safetensors.0f.tmp").write_bytes(b"half")
    Checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003.safetensors"]


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: b"", "can't be used"),
        (lambda data: data[:40], "can't be used"),
        (lambda data: data[:-1], "can't be used"),
        (lambda data: flip(data, len(data) - 1), "its content does not match its digest"),
        (lambda data: data.replace(b'\\"step\\":3', b'\\"step\\":2', 1), "its content does not match its digest"),
        (lambda data: data.replace(b'"version":"1"', b'"version":"9"', 1), "its format version is 9, not 1"),
        (lambda data: data.replace(b"now/a", b"now/c", 1), "its content does not match its digest"),
    ],
)
def test_damage_of_any_kind_leads_to_the_one_before(tmp_path, caplog, damage, problem):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make(2))
    newest = checkpoints.save(make(3))
    before = newest.read_bytes()
    newest.write_bytes(damage(before))
    assert newest.read_bytes() != before
    assert checkpoints.newest(SHAPES).progress.step == 2
    assert "step-00000003.safetensors can't be used" in caplog.text
    assert problem in caplog.text


def test_a_checkpoint_of_another_adapter_is_passed_over(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make(3))
    assert checkpoints.newest({**SHAPES, "a": (2, 4)}) is None
    assert "it holds other tensors than this training has" in caplog.text
