"""Shards that a killed run left are neither reused nor mixed in."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tasks.data.encoding import Encoder

PROJECT = Path(__file__).parents[2]


def test_after_a_kill_while_writing_the_stage_runs_again_and_is_whole(tokenize_runs, tmp_path, stories):
    data = tmp_path / "train.jsonl"
    count = 20_000
    with data.open("w") as file:
        for index in range(count):
            file.write(json.dumps({"instruction": f"No. {index}", "output": f"It is {index}."}) + "\n")
    code = (
        "import sys; from pathlib import Path; from tokenize_runs import TokenizeRuns;"
        "TokenizeRuns(Path(sys.argv[1]), Path(sys.argv[2]))(Path(sys.argv[3]), rows_per_shard=100)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(tokenize_runs.store.root), str(stories), str(data)],
        env={"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests' / 'support'}", "PATH": ""},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    pattern = "work/tokenize/*/build/train/part-*.arrow"
    while len(list(tokenize_runs.store.root.glob(pattern))) < 3:
        assert time.monotonic() < deadline
        assert runner.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    (child,) = psutil.Process(runner.pid).children()
    child.send_signal(signal.SIGKILL)
    assert runner.wait(30) != 0
    assert list(tokenize_runs.store.root.glob(pattern)), "the kill left nothing to be confused by"

    ref, outcome = tokenize_runs(data, rows_per_shard=100)
    assert outcome.action == "ran"
    labels = tokenize_runs.labels(ref)
    assert len(labels) == count
    encoder = Encoder(stories)
    assert encoder.decode(labels[0]).strip() == "It is 0."
    assert encoder.decode(labels[-1]).strip() == f"It is {count - 1}."
    assert tokenize_runs(data, rows_per_shard=100)[1].action == "reused"


def test_leftovers_in_the_place_of_the_artifact_are_set_aside(tokenize_runs, case_folder, tmp_path):
    data = case_folder(12) / "train.jsonl"
    expected = json.loads((case_folder(12) / "expected.json").read_text())
    first, _ = tokenize_runs(data)
    wanted = tokenize_runs.labels(first)
    place = tokenize_runs.store.root / first.location
    shutil.rmtree(place)
    (place / "train").mkdir(parents=True)
    for path in (case_folder(12) / "leftovers").iterdir():
        shutil.copy(path, place / "train" / path.name)

    ref, outcome = tokenize_runs(data)
    assert outcome.action == "ran"
    assert "no readable manifest.json" in outcome.reason
    labels = tokenize_runs.labels(ref)
    assert len(labels) == expected["rows_after_rerun"]
    assert labels == wanted
    assert ref == first
    assert tokenize_runs(data)[1].action == "reused"
    (reason,) = (tokenize_runs.store.root / "aside" / "damaged").glob("*.reason.txt")
    assert "no readable manifest.json" in reason.read_text()
