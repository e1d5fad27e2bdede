"""The main job through the command line, as a user runs it. The tests of one root build on one another's run."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from command_line import QUICK, STAGES, imported_packages

from tasks.store import Store

pytestmark = pytest.mark.e2e


def test_the_first_run_makes_six_artifacts(finished):
    cli, answer = finished
    assert answer.actions() == dict.fromkeys(STAGES, "ran")
    metrics = answer.document["stages"][-1]["metrics"]
    assert metrics["loss_after"] < metrics["loss_before"]
    report = Path(answer.document["stages"][-1]["path"]) / "report.html"
    assert "<html" in report.read_text(encoding="utf-8")
    assert cli("artifacts", "verify", "--json").document == {"whole": 6, "damaged": []}


def test_the_second_run_reuses_all_without_framework_or_server(finished):
    cli, first = finished
    answer = cli("run", "stories260k", *QUICK, "--json", PYTHONPROFILEIMPORTTIME="1")
    assert answer.actions() == dict.fromkeys(STAGES, "reused")
    assert [stage["digest"] for stage in answer.document["stages"]] == [
        stage["digest"] for stage in first.document["stages"]
    ]
    imported = imported_packages(answer.err)
    assert "schemas" in imported
    assert imported.isdisjoint({"mindspore", "mindnlp", "prefect", "transformers", "pyarrow"})


def test_the_plan_says_what_would_run_and_why(finished):
    cli, _ = finished
    answer = cli("plan", "stories260k", *QUICK, "--set", "train.learning_rate=1e-3", "--json")
    rows = {stage["stage"]: stage for stage in answer.document["stages"]}
    assert [rows[name]["action"] for name in STAGES] == ["reuse", "reuse", "run", "run", "run", "run"]
    assert rows["train"]["reason"] == "train.learning_rate: 0.005 -> 0.001"


def test_forcing_one_stage_runs_exactly_that_one(finished):
    cli, first = finished
    before = {path.name for path in cli.root.glob("*/*") if path.is_dir()}
    answer = cli("stage", "evaluate", "--run", first.document["run"], "--force", "--json")
    assert answer.code == 0, answer.err
    (stage,) = answer.document["stages"]
    assert (stage["stage"], stage["action"]) == ("evaluate", "ran")
    assert stage["digest"] == first.document["stages"][-1]["digest"]
    assert {path.name for path in cli.root.glob("*/*") if path.is_dir()} == before


def test_a_stage_made_again_marks_what_follows_as_stale(finished):
    cli, _ = finished
    run = cli("run", "stories260k", *QUICK, "--json").document["run"]
    answer = cli("stage", "train", "--run", run, "--set", "train.learning_rate=5e-4", "--json")
    assert answer.actions() == {"train": "ran"}
    assert answer.document["stale"] == ["merge", "export", "evaluate"]
    shown = cli("show", run)
    assert shown.out.count("stale (") == 3
    why = cli("artifacts", "why", run, "train", "--json").document
    assert [change["path"] for change in why["differences"]] == ["config.train.learning_rate"]


def test_settings_of_earlier_stages_are_refused_for_one_stage(finished):
    cli, _ = finished
    answer = cli("stage", "merge", "--set", "train.epochs=1", "--json")
    assert answer.code == 2
    assert answer.document["error"]["code"] == "config.upstream_override"


def test_generate_answers_from_the_exported_model(finished):
    cli, first = finished
    answer = cli("generate", "--run", first.document["run"], "--prompt", "What color is the sky?", "--json")
    assert answer.code == 0, answer.err
    assert answer.document["tokens"] > 0
    assert answer.document["text"].strip()


def test_a_damaged_artifact_is_made_again_and_what_depends_on_it_is_reused(finished, tmp_path):
    cli, first = finished
    copy = type(cli)(tmp_path / "copy")
    shutil.copytree(cli.root, copy.root)
    tokens = Path(copy.root) / Path(first.document["stages"][1]["path"]).relative_to(cli.root)
    shard = next((tokens / "train").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (tokens.parent.parent / "evaluate").rename(tmp_path / "gone")  # so that something has to run
    answer = copy("run", "stories260k", *QUICK, "--json")
    assert answer.code == 0, answer.err
    assert answer.actions() == {
        "validate_env": "reused",
        "tokenize": "ran",
        "train": "reused",
        "merge": "reused",
        "export": "reused",
        "evaluate": "ran",
    }
    assert "has changed" in answer.document["stages"][1]["reason"]
    assert list((copy.root / "aside" / "damaged").glob("tokenize-*.reason.txt"))


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

    for stage, folder in Store(cli.root).artifact_folders():
        assert Store(cli.root).find(stage, folder.name, deep=True)[0] is not None
    answer = cli(*arguments)
    assert answer.code == 0, answer.err
    assert [answer.actions()[name] for name in STAGES] == ["reused", "reused", "ran", "ran", "ran", "ran"]
    train = Path(answer.document["stages"][2]["path"])
    assert '"resumed_from_step":0' not in (train / "timings.json").read_text().replace(" ", "")
    assert os.listdir(cli.root / "work" / "train") == []  # noqa: PTH208
