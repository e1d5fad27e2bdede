"""The end token is trained although it is also the pad token: the labels as they are stored.

Shards are not padded, and padding is masked by its position when rows become a batch, so the pad token can't hide the
end token.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer


@pytest.mark.parametrize("template", ["alpaca", "alpaca-zh", "chatml", "plain"])
def test_each_record_has_its_answer_and_one_end_token_as_labels(
    case_folder: Any, tokenize_files: Any, template: str
) -> None:
    folder = case_folder(7)
    config = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    assert config["pad_token"] == config["eos_token"]
    assert tokenizer.token_to_id(config["pad_token"]) == 2
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = tokenize_files(
        folder / "train.json", tokenizer=folder / "tokenizer", template=template, max_length=settings["max_length"]
    )
    assert made.trained() == [record["label_ids"] for record in expected["records"]]
    for ids, labels in made.train:
        assert labels.count(2) == 1
        assert labels[-1] == ids[-1] == 2
        assert len(ids) == len(labels)
        assert 2 not in ids[:-1]
