"""The key follows the content of the data, not its path, size or time."""

import json
import os
import shutil
from datetime import datetime

from tasks.data.encoding import Encoder


def test_new_content_runs_and_old_content_is_reused(tokenize_runs, case_folder, tmp_path, stories):
    folder = case_folder(13)
    expected = json.loads((folder / "expected.json").read_text())
    when = datetime.fromisoformat(expected["modification_time_for_both"]).timestamp()
    path, elsewhere = tmp_path / "train.jsonl", tmp_path / "elsewhere" / "other.jsonl"
    elsewhere.parent.mkdir()

    def put(version: int, target=path, time=when):
        source = folder / f"version{version}.jsonl"
        assert source.stat().st_size == expected["size_bytes_of_both"]
        shutil.copyfile(source, target)
        if time:
            os.utime(target, (time, time))
        return tokenize_runs(target)

    first, outcome = put(1)
    assert outcome.action == "ran"
    assert put(1)[1].action == "reused"
    third, outcome = put(2)
    assert outcome.action == "ran"
    assert third != first
    answers = [Encoder(stories).decode(labels) for labels in tokenize_runs.labels(third)]
    assert "905" in answers[5]
    assert "911" in answers[11]
    assert put(1) == (first, put(1)[1])
    assert put(1)[1].action == "reused"
    fifth, outcome = put(1, elsewhere, None)
    assert (fifth, outcome.action) == (first, "reused")
