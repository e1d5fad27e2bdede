"""JSON Lines with blank lines, a stray comma, and no newline at the end; an array with a comma before its bracket."""

import json
from typing import Any

import pytest

from schemas.errors import InputError
from tasks.data.encoding import Encoder
from tasks.data.first_look import sniff
from tasks.data.readers import RecordReader
from tasks.data.records import Record, exchange
from tasks.data.sources import DataFile


def test_each_line_has_the_fate_expected(case_folder: Any) -> None:
    expected = json.loads((case_folder(2) / "expected.json").read_text(encoding="utf-8"))["train.jsonl"]
    path = case_folder(2) / "train.jsonl"
    assert not path.read_bytes().endswith(b"\n")
    lines = path.read_text(encoding="utf-8").splitlines()
    items = list(RecordReader(DataFile(path, path.name)))
    kept = {item.line: item for item in items if isinstance(item, Record)}
    assert sorted(kept) == expected["good_lines"]
    assert [item.line for item in items if not isinstance(item, Record)] == expected["bad_lines"]
    assert len(items) + len(expected["blank_lines"]) == len(lines) == 7
    for number, record in kept.items():
        row = json.loads(lines[number - 1])
        assert record.turns == exchange(row["instruction"], row["output"], row["input"])


def test_the_report_counts_the_bad_line_and_the_good_ones_are_trained_on(
    case_folder: Any, tokenize_files: Any, stories: Any
) -> None:
    made = tokenize_files(case_folder(2) / "train.jsonl")
    assert (made.report.read, made.report.kept, made.report.rejected) == (5, 4, 1)
    (rejected,) = made.rejected
    assert (rejected.source, rejected.line, rejected.record) == ("train.jsonl", 4, None)
    assert rejected.reason.startswith("not valid JSON (Extra data, column ")
    decode = Encoder(stories).decode
    assert [decode(answer) for answer in made.trained()] == ["二", "四", "十", "十二"]


def test_the_strict_mode_names_the_file_and_the_line(case_folder: Any, tokenize_files: Any) -> None:
    with pytest.raises(InputError, match=r"Line 4 of train\.jsonl can't be used: not valid JSON"):
        tokenize_files(case_folder(2) / "train.jsonl", on_bad="stop")


def test_the_array_stops_with_file_and_place(case_folder: Any, tokenize_files: Any) -> None:
    path = case_folder(2) / "array_trailing_comma.json"
    near = json.loads((case_folder(2) / "expected.json").read_text(encoding="utf-8"))[path.name]["error_near_line"]
    sniff(DataFile(path, path.name))  # its first records are well
    with pytest.raises(InputError, match=rf"{path.name} is not valid JSON near line {near}, column 1: ") as caught:
        tokenize_files(path)
    assert caught.value.code == "data.not_json"
