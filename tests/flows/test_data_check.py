import json

import pytest
from command_line import imported_packages

PRESET = "stories260k"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nWho are you?,I am Tim.\nWhat?,\nWhere?,here,there\n")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": [{"role": role, "content": "[red]\n"} for role in ("user", "assistant") * 2]})
    )
    return tmp_path


COLUMNS = ["--set", "data.columns={instruction: question, output: answer}", "--set", "data.validation_share=0"]


def test_the_document_says_what_would_be_trained_on(cli, files):
    answer = cli(
        "data", "check", str(files / "a.csv"), "--preset", PRESET, *COLUMNS, "--json", PYTHONPROFILEIMPORTTIME="1"
    )
    assert answer.code == 1  # two of three can't be used
    found = answer.document
    assert "more than data.max_rejected_share" in found["problem"]
    assert (found["ok"], found["proof"]) == (False, {"rows": 1, "fault": None})
    (file,) = found["files"]
    assert (file["name"], file["container"], file["format"]) == ("a.csv", "csv", "alpaca")
    assert found["rejected"]["reasons"] == {"answer is empty": 1, "wrong number of columns": 1}
    assert [item["line"] for item in found["rejected"]["first"]] == [3, 4]
    assert [record["fate"] for record in found["records"]] == ["train", "rejected", "rejected"]
    (row,) = found["records"][0]["rows"]
    assert "".join(token["text"] for token in row if token["is_trained"] and not token["is_control"]) == "I am Tim."
    assert found["tokens"]["trained"] == sum(token["is_trained"] for token in row)
    assert imported_packages(answer.err).isdisjoint({"mindspore", "prefect", "torch", "mindnlp"})
    assert not cli.root.exists()


def test_the_page_shows_what_is_trained_without_colours(cli, files):
    answer = cli("data", "check", str(files / "b.jsonl"), "--preset", PRESET, "--set", "data.validation_share=0")
    assert answer.code == 0
    trained = [line for line in answer.out.splitlines() if line.startswith("trained")]
    assert len(trained) == 2
    assert all("\\n·" in line and "<s>·1" in line for line in trained)
    assert "b.jsonl" in answer.out
    assert "JSON Lines" in answer.out
    assert "proof: 1 rows train on exactly the answers" in answer.out


def test_one_record_can_be_asked_for(cli):
    answer = cli("data", "check", "--preset", PRESET, "--index", "7", "--json")
    assert answer.code == 0
    assert [record["place"] for record in answer.document["records"]] == ["Record 7 of stories_qa.json"]


def test_data_that_cannot_be_read_is_bad_input(cli, files):
    answer = cli("data", "check", str(files / "a.csv"), "--preset", PRESET, "--json")
    assert answer.code == 2
    assert answer.document["error"]["code"] == "data.unknown_keys"
    assert "{instruction: question, output: answer}" in answer.document["error"]["hint"]
