"""What a whole run says about its model: one loss whoever computes it, and a report that lacks nothing."""

import json
from pathlib import Path

import pytest

from schemas.reports import TrainReport

pytestmark = pytest.mark.e2e


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
    for stage in ("tokenize", "train", "merge", "export", "evaluate"):
        assert f"{stage}/{found[stage].name[:12]}" in page
    assert answer.document["run"] in page
