"""The answer marker, other template text, braces and the end token's text inside a record."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.records import Turn
from tasks.data.templates import TEMPLATES


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_answer_and_nothing_else_is_trained(
    case_folder: Any, tokenize_files: Any, stories: Any, template: Any
) -> None:
    folder = case_folder(5)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    records = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    made = tokenize_files(folder / "train.json", tokenizer=folder / "tokenizer", template=template, max_length=1024)
    assert made.rejected == []
    for record, wanted, trained, masked in zip(
        records, expected["records"], made.trained(), made.masked(), strict=True
    ):
        assert trained == [*wanted["label_ids_before_eos"], expected["eos_id"]]
        assert tokenizer.decode(trained[:-1]) == wanted["answer_text"] == record["output"]
        prompt = TEMPLATES[template].write([Turn("user", record["instruction"], record["input"])]).text()
        assert tokenizer.decode(masked, skip_special_tokens=False) == prompt
        assert record["instruction"] in prompt
        assert record["input"] in prompt
        assert expected["eos_id"] not in masked


def test_the_chinese_template_is_filled_in_letter_for_letter(case_folder: Any, tokenize_files: Any) -> None:
    folder = case_folder(5)
    made = tokenize_files(folder / "train.json", tokenizer=folder / "tokenizer", template="alpaca-zh", max_length=1024)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    assert tokenizer.decode(made.masked()[3]) == (
        "### 指令\n{output} {input} {0} %s {{x}}\n\n### 输入\n{instruction}\n\n### 输出\n"
    )
