"""CSV with quotes, commas, line breaks and words that look like missing values."""

import json
from typing import Any

import pytest

from schemas.errors import InputError
from tasks.data.encoding import Encoder
from tasks.data.first_look import sniff
from tasks.data.readers import RecordReader
from tasks.data.records import Record, exchange
from tasks.data.sources import DataFile


def expectation(case_folder: Any) -> Any:
    return json.loads((case_folder(4) / "expected.json").read_text(encoding="utf-8"))


def test_the_records_are_exactly_those_expected(case_folder: Any) -> None:
    path = case_folder(4) / "train.csv"
    sniff(DataFile(path, path.name))
    items = list(RecordReader(DataFile(path, path.name)))
    assert len(items) == 11
    # line breaks inside a field are kept as they are
    assert [item.turns for item in items if isinstance(item, Record)] == [
        exchange(row["instruction"], row["output"], row["input"]) for row in expectation(case_folder)["kept"]
    ]
    assert not any(item.has_number for item in items if isinstance(item, Record))


def test_the_other_records_are_listed_with_number_and_reason(case_folder: Any, tokenize_files: Any) -> None:
    made = tokenize_files(case_folder(4) / "train.csv")
    wanted = expectation(case_folder)["rejected_records_counted_from_1"]
    reasons = {
        "empty output": "output is empty",
        "two columns where three are declared": "wrong number of columns (2, the header has 3)",
        "four columns where three are declared": "wrong number of columns (4, the header has 3)",
    }
    assert [(item.source, item.record + 1, item.reason) for item in made.rejected] == [
        ("train.csv", int(number), reasons[reason]) for number, reason in wanted.items()
    ]
    assert [item.line for item in made.rejected] == [12, 13, 14]
    assert (made.report.read, made.report.kept, made.report.rejected) == (11, 8, 3)


def test_the_answers_are_trained_on_as_they_stand(case_folder: Any, tokenize_files: Any, stories: Any) -> None:
    made = tokenize_files(case_folder(4) / "train.csv")
    decode = Encoder(stories).decode
    assert [decode(answer) for answer in made.trained()] == [row["output"] for row in expectation(case_folder)["kept"]]


def test_the_strict_mode_names_the_first_bad_record(case_folder: Any, tokenize_files: Any) -> None:
    with pytest.raises(InputError, match=r"Record 8 \(line 12\) of train\.csv can't be used: output is empty\."):
        tokenize_files(case_folder(4) / "train.csv", on_bad="stop")
