"""What a kill in the middle of a run leaves, and what the next run makes of it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from command_line import STAGES

from tasks.store import Store

pytestmark = pytest.mark.e2e


def _children(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(root) in " ".join(process.cmdline()) + process.environ().get("MINDTUNE_ARTIFACTS", ""):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _start_and_wait_for_checkpoint(cli, arguments: list[str]) -> subprocess.Popen:
    process = subprocess.Popen(
        cli.command(*arguments), env=cli.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    known = set(cli.root.glob("work/train/*/keep/checkpoints/*"))
    while set(cli.root.glob("work/train/*/keep/checkpoints/*")) <= known:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)
    return process


def test_killed_child_and_killed_parent_lose_nothing_that_was_finished(cli):
    settings = ["train.max_steps=150", "train.checkpoint_every_steps=5", "evaluate.max_new_tokens=8"]
    arguments = ["run", "stories260k", "--json", *(part for text in settings for part in ("--set", text))]

    process = _start_and_wait_for_checkpoint(cli, arguments)
    (child,) = [one for one in _children(cli.root) if "tasks.child" in " ".join(one.cmdline())]
    child.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert '"stage.crashed"' in out
    assert "SIGKILL" in out

    process = _start_and_wait_for_checkpoint(cli, arguments)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 15
    while _children(cli.root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _children(cli.root) == []

    assert cli("show", "latest", "--json").document["status"] == "interrupted"

    for stage, folder in Store(cli.root).artifact_folders():
        assert Store(cli.root).find(stage, folder.name, deep=True)[0] is not None
    answer = cli(*arguments)
    assert answer.code == 0, answer.err
    assert [answer.actions()[name] for name in STAGES] == ["reused", "reused", "ran", "ran", "ran", "ran"]
    train = Path(answer.document["stages"][2]["path"])
    assert '"resumed_from_step":0' not in (train / "timings.json").read_text().replace(" ", "")
    assert os.listdir(cli.root / "work" / "train") == []  # noqa: PTH208
