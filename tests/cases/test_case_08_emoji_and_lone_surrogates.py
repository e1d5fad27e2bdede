"""Emoji, joined emoji, half surrogate pairs, a NUL and an inner byte order mark, through to the shards.

A record with half a pair is rejected with its index; in JSON Lines, bytes that are not UTF-8 cost their own line.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.shards import TokenRows


@pytest.mark.parametrize("template", ["alpaca-zh", "chatml", "plain"])
def test_values_come_back_from_the_shards_code_point_for_code_point(
    case_folder: Any, tokenize_files: Any, template: str
) -> None:
    folder = case_folder(8)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(case_folder(6) / "tokenizer" / "tokenizer.json"))  # one token a byte
    made = tokenize_files(folder / "train.json", tokenizer=case_folder(6) / "tokenizer", template=template)
    assert [item.record for item in made.rejected] == expected["surrogates"]["indices"]
    assert all(item.reason.startswith("half a surrogate pair in ") for item in made.rejected)
    rows = TokenRows(made.folder / "train")
    texts = []
    for index, label_ids in enumerate(made.trained()):
        assert rows.row(index).input_ids[-1] == label_ids[-1] == 2
        texts.append(tokenizer.decode(label_ids[:-1], skip_special_tokens=False))
    indices = [index for index in range(10) if index not in expected["surrogates"]["indices"]]
    assert {str(index): list(map(ord, text)) for index, text in zip(indices, texts, strict=True)} == expected[
        "kept_exactly"
    ]


def test_values_survive_a_tokenizer_with_byte_fallback(case_folder: Any, tokenize_files: Any, stories: Any) -> None:
    expected = json.loads((case_folder(8) / "expected.json").read_text(encoding="utf-8"))["kept_exactly"]
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    made = tokenize_files(case_folder(8) / "train.json")
    texts = [tokenizer.decode(label_ids[:-1], skip_special_tokens=False) for label_ids in made.trained()]
    assert [list(map(ord, text)) for text in texts] == list(expected.values())


def test_bytes_that_are_not_utf8_are_named_with_file_and_line(case_folder: Any, tokenize_files: Any) -> None:
    expected = json.loads((case_folder(8) / "expected.json").read_text(encoding="utf-8"))["train_bad_utf8.jsonl"]
    made = tokenize_files(case_folder(8) / "train_bad_utf8.jsonl", max_rejected_share=0.9)
    assert [(item.source, item.line) for item in made.rejected] == [
        ("train_bad_utf8.jsonl", line) for line in expected["bad_lines"]
    ]
    assert {item.reason for item in made.rejected} == {"bytes that are not UTF-8"}
    assert len(made.train) == len(expected["good_lines"])
