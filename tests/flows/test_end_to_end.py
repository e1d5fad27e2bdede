"""The main job through the command line, as a user runs it: one finished run, and what is done with it afterwards."""

import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import QUICK, STAGES, imported_packages

from schemas.reports import TrainReport

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


def folders(answer) -> dict[str, Path]:
    return {stage["stage"]: Path(stage["path"]) for stage in answer.document["stages"]}


def test_evaluation_and_training_agree_on_the_loss_of_the_same_rows(finished):
    _, answer = finished
    found = folders(answer)
    measured = json.loads((found["evaluate"] / "report.json").read_text(encoding="utf-8"))
    trained = TrainReport.model_validate_json((found["train"] / "report.json").read_text(encoding="utf-8"))
    validation = {point.step: point.loss for point in trained.validation}
    assert measured["rows_too_long"] == 0  # else the rows would not be the same
    # float32 by two graphs, one of them the merged MindIR: differences of 1e-6 were seen
    assert measured["loss_before"] == pytest.approx(validation[0], abs=1e-4)
    assert measured["loss_after"] == pytest.approx(validation[trained.kept_step], abs=1e-4)


def test_report_of_a_whole_run_follows_its_artifacts_to_the_first(finished):
    _, answer = finished
    found = folders(answer)
    page = (found["evaluate"] / "report.html").read_text(encoding="utf-8")
    assert "not at hand" not in page
    assert "not there any more" not in page
    made = dict(re.findall(r'<tr><td>(\w+)</td><td><code title="(\w+)">', page))  # the table of stages and keys
    assert made == {stage: found[stage].name for stage in STAGES}
    assert answer.document["run"] in page
