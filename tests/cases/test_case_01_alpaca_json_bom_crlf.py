"""Files saved by a Windows editor: a byte order mark at the start, lines that end with CR LF."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.data.first_look import sniff
from tasks.data.readers import RecordReader
from tasks.data.records import Record
from tasks.data.sources import DataFile


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_the_records_are_exactly_those_expected(case_folder: Any, name: str) -> None:
    expected = json.loads((case_folder(1) / "expected.json").read_text(encoding="utf-8"))
    path = case_folder(1) / name
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert b"\r\n" in path.read_bytes()
    sniff(DataFile(path, name))
    items = list(RecordReader(DataFile(path, name)))
    assert expected["rejected"] == []
    assert [
        dict(zip(("instruction", "input", "output"), item.texts(), strict=True))
        for item in items
        if isinstance(item, Record)
    ] == expected["rows"]
    for item in items:
        assert isinstance(item, Record)
        assert not any(text.startswith("\ufeff") or text.endswith("\r") for text in item.texts())


def test_all_ways_to_save_the_records_give_the_same_ids_and_labels(
    case_folder: Any, tokenize_files: Any, tmp_path: Path
) -> None:
    made = [tokenize_files(case_folder(1) / name) for name in ("train.json", "train.jsonl")]
    for name in ("train.json", "train.jsonl"):
        path = tmp_path / name
        path.write_bytes((case_folder(1) / name).read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"))
        made.append(tokenize_files(path))
    assert [len(each.train) for each in made] == [3, 3, 3, 3]
    assert made[0].train == made[1].train == made[2].train == made[3].train
