"""Alpaca records with missing, null and empty fields."""

import json
from typing import Any

import pytest

from schemas.errors import InputError
from tasks.data.encoding import Encoder


def rows_by_record(case_folder: Any, tokenize_files: Any) -> tuple[Any, dict[int, tuple[list[int], list[int]]]]:
    made = tokenize_files(case_folder(3) / "train.json")
    rejected = {item.record for item in made.rejected}
    kept = [index for index in range(12) if index not in rejected]
    return made, dict(zip(kept, made.train, strict=True))


def test_every_record_has_the_fate_expected(case_folder: Any, tokenize_files: Any) -> None:
    expected = json.loads((case_folder(3) / "expected.json").read_text(encoding="utf-8"))
    made, rows = rows_by_record(case_folder, tokenize_files)
    assert {str(item.record): item.reason for item in made.rejected} == expected["rejected"]
    # record 9, whose output is the number 42, is kept as the text 42, and the report counts it
    assert sorted(rows) == sorted([*expected["kept_unchanged"], 9])
    assert made.report.numbers_as_text == 1
    assert made.report.kept + made.report.rejected == made.report.read == 12
    assert sum(made.report.reasons.values()) == made.report.rejected


def test_kept_records_are_trained_on_their_outputs(case_folder: Any, tokenize_files: Any, stories: Any) -> None:
    records = json.loads((case_folder(3) / "train.json").read_text(encoding="utf-8"))
    _, rows = rows_by_record(case_folder, tokenize_files)
    encoder = Encoder(stories)
    for index, (ids, labels) in rows.items():
        trained = [label for label in labels if label != -100]
        assert trained[-1] == encoder.eos_id
        assert encoder.decode(trained) == str(records[index]["output"])
        assert not any(word in encoder.decode(ids).replace("input 为 null", "") for word in ("None", "null", "nan"))


@pytest.mark.parametrize("template", ["alpaca", "alpaca-zh", "chatml", "plain"])
def test_a_missing_or_null_input_gives_the_prompt_of_an_empty_one(
    case_folder: Any, tokenize_files: Any, tmp_path: Any, template: str
) -> None:
    records = json.loads((case_folder(3) / "train.json").read_text(encoding="utf-8"))[1:3]
    as_they_are, with_empty = tmp_path / "a.json", tmp_path / "b.json"
    as_they_are.write_text(json.dumps(records), encoding="utf-8")
    with_empty.write_text(json.dumps([{**record, "input": ""} for record in records]), encoding="utf-8")
    first, second = (tokenize_files(path, template=template).train for path in (as_they_are, with_empty))
    assert len(first) == 2
    assert first == second


def test_the_strict_mode_names_the_first_bad_record_and_its_field(case_folder: Any, tokenize_files: Any) -> None:
    with pytest.raises(InputError, match=r"Record 3 of train\.json can't be used: output is null\."):
        tokenize_files(case_folder(3) / "train.json", on_bad="stop")
