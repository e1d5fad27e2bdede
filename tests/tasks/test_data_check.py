import json
from pathlib import Path
from typing import Any

import pytest

from schemas.config import LlmConfig
from schemas.errors import InputError, StageError
from tasks import data_check
from tasks.data import making
from tasks.data_check import DataCheck, check_data


def write(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def exchange(number: int) -> dict[str, str]:
    return {"instruction": f"Question {number}", "input": "", "output": f"Answer {number}"}


@pytest.fixture
def check(stories: Path) -> Any:
    def run(*sources: Any, records: int = 3, index: int | None = None, **settings: Any) -> DataCheck:
        data = {name: settings.pop(name) for name in ("on_bad", "max_rejected_share", "validation") if name in settings}
        config = LlmConfig.model_validate(
            {
                "model": {"base": str(stories)},
                "data": {
                    "train": [source if isinstance(source, dict) else str(source) for source in sources],
                    **({} if "validation" in data else {"validation_share": 0}),
                    **data,
                },
                "tokenize": {"template": "plain", **settings},
            }
        )
        return check_data(config, lambda *_: None, records, index)

    return run


def test_rows_are_those_that_tokenize_writes(check: Any, tokenize_files: Any, tmp_path: Path) -> None:
    path = write(tmp_path, *map(exchange, range(5)))
    found, made = check(path, records=5), tokenize_files(path)
    rows = [row for record in found.shown for row in record.rows]
    assert [[token.id for token in row] for row in rows] == [ids for ids, _ in made.train]
    assert [[token.id if token.is_trained else -100 for token in row] for row in rows] == [
        labels for _, labels in made.train
    ]
    assert found.lengths.total() == made.report.train.rows
    assert found.trained_tokens == made.report.train.trained_tokens
    assert found.is_well


def test_texts_of_tokens_join_to_what_was_written(check: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"instruction": "Who is 小狸?", "output": "字 é \U0001f600"})
    (record,) = check(path).shown
    (row,) = record.rows
    answer = [token for token in row if token.is_trained]
    assert "".join(token.text for token in answer[:-1]) == "字 é \U0001f600"
    assert answer[-1].is_control
    assert "Who is 小狸?" in "".join(token.text for token in row if not token.is_trained)
    assert [token.text for token in row if token.is_control] == ["<s>", "</s>"]


def test_every_record_has_a_fate(check: Any, tmp_path: Path) -> None:
    path = write(tmp_path, exchange(0), {"instruction": "a", "output": ""}, *map(exchange, range(2, 40)))
    found = check({"path": str(path), "weight": 0.5}, records=40)
    fates = [record.fate for record in found.shown]
    assert set(fates) == {"train", "left out", "rejected"}
    assert [record.reason for record in found.shown if record.fate == "rejected"] == ["output is empty"]
    (file,) = found.files
    assert (file.train, file.left_out, file.rejected) == tuple(map(fates.count, ("train", "left out", "rejected")))
    assert (file.container, file.format, file.weight) == ("lines", "alpaca", 0.5)
    twice = check({"path": str(path), "weight": 2}, index=3)
    (record,) = twice.shown
    assert (record.place, record.copies) == ("Record 3 (line 4) of data.jsonl", 2)
    assert twice.lengths.total() == 2 * twice.files[0].train


def test_lengths_are_told_by_quantiles(check: Any, tmp_path: Path) -> None:
    records = [{"instruction": "a", "output": "b" * count} for count in (1, 2, 3, 4, 400)]
    found = check(write(tmp_path, *records), max_length=64)
    assert dict(found.reasons) == {"longer than max_length": 1}
    lengths = found.quantiles()
    assert list(lengths) == ["shortest", "50%", "90%", "99%", "longest"]
    assert lengths["shortest"] <= lengths["50%"] <= lengths["longest"] == lengths["shortest"] + 3
    cut = check(write(tmp_path, {"instruction": "a" * 200, "output": "b"}), max_length=64, too_long="cut_prompt")
    assert (cut.cut, cut.lengths) == (1, {64: 1})


@pytest.mark.parametrize(
    ("bad", "settings", "problem"),
    [
        (5, {}, "no record is left to train on"),
        (4, {}, "4 of 5 records can't be used, more than data.max_rejected_share allows"),
        (4, {"max_rejected_share": 0.9}, None),
        (1, {}, None),
        (
            1,
            {"on_bad": "stop"},
            "data.on_bad is stop, and Record 0 (line 1) of data.jsonl can't be used: output is null",
        ),
    ],
)
def test_why_a_run_would_end_is_what_ends_it(
    check: Any, tokenize_files: Any, tmp_path: Path, bad: int, settings: Any, problem: str | None
) -> None:
    path = write(tmp_path, *[{"instruction": "a", "output": None}] * bad, *map(exchange, range(5 - bad)))
    found = check(path, **settings)
    assert (found.problem, found.is_well) == (problem, problem is None)
    if problem is None:
        tokenize_files(path, **settings)
    else:
        with pytest.raises(InputError):
            tokenize_files(path, **settings)


def test_held_out_files_are_counted_apart_and_missed(check: Any, tmp_path: Path) -> None:
    path = write(tmp_path, exchange(0))
    held = tmp_path / "held.json"
    held.write_text('[{"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}]')
    found = check(path, validation=[str(held)])
    assert [(file.train, file.held_out, file.rejected) for file in found.files] == [(1, 0, 0), (0, 1, 1)]
    held.write_text('[{"instruction": "a", "output": ""}]')
    assert (
        check(path, validation=[str(held)], max_rejected_share=1).problem == "no record of data.validation can be used"
    )


def test_a_row_that_would_be_trained_wrongly_is_a_fault(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise StageError("data.mask_broken", stage="tokenize", place="Record 0", problem="no label (of 3)")

    monkeypatch.setattr(making, "make_rows", broken)
    found = check(write(tmp_path, exchange(0)))
    assert not found.is_well
    assert found.fault == "Record 0 would be trained wrongly: no label (of 3)."
    assert found.problem is None


def test_the_list_of_rejects_has_an_end_and_their_count_has_not(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_check, "LISTED_REJECTS", 2)
    found = check(write(tmp_path, exchange(0), *[{"instruction": "a", "output": ""}] * 5))
    assert (len(found.rejected), found.reasons["output is empty"]) == (2, 5)
