"""The data files that come with the presets, and what their data card says of them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tasks.data.encoding import Encoder
from tasks.data.masks import TokenRow, make_row
from tasks.data.readers import Record, RecordReader
from tasks.data.sources import DataFile
from tasks.data.templates import TEMPLATES

DATA = Path(__file__).parents[2] / "flows" / "presets" / "data"


TOKENIZER = DATA / "stories_tokenizer"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    items = list(RecordReader(DataFile(DATA / "stories_qa.json", "stories_qa.json")))
    assert all(isinstance(item, Record) for item in items)
    return [item for item in items if isinstance(item, Record)]


def test_the_data_card_gives_the_right_numbers(records: list[Record], stories: Path) -> None:
    card = (DATA / "README.md").read_text(encoding="utf-8")
    encoder = Encoder(stories)
    rows = [make_row(record, TEMPLATES["plain"], encoder, 10_000) for record in records]
    longest = max(len(row.input_ids) for row in rows if isinstance(row, TokenRow))
    words = [len(record.output.split()) for record in records]
    empty = sum(not record.input for record in records)
    numbers = [
        rf"\| rows \| {len(records)}, with {len({record.output for record in records})} different answers \|",
        rf"empty in {empty} rows, a sentence of a story in {len(records) - empty}\)",
        rf"answers of {min(words)} to {max(words)} words; .* at most {longest} tokens a row",
    ]
    for number in numbers:
        assert re.search(number, card), number


def test_no_question_stands_twice(records: list[Record]) -> None:
    questions = [(record.instruction.casefold(), record.input.casefold()) for record in records]
    assert len(set(questions)) == len(questions)


def test_every_text_is_a_plain_english_sentence(records: list[Record]) -> None:
    for record in records:
        for text in (record.instruction, record.input, record.output):
            assert re.fullmatch(r"([A-Z][A-Za-z ,'!?.]*[.!?])?", text), text
            assert "  " not in text


def test_every_record_has_its_three_keys_and_no_other() -> None:
    for record in json.loads((DATA / "stories_qa.json").read_text(encoding="utf-8")):
        assert list(record) == ["instruction", "input", "output"]


def test_the_tokenizer_is_the_models_with_another_end_token(stories: Path) -> None:
    assert (TOKENIZER / "tokenizer.json").read_bytes() == (stories / "tokenizer.json").read_bytes()
    ours, its = (
        json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) for folder in (TOKENIZER, stories)
    )
    assert ours == {**its, "eos_token": "<s>"}
    assert (Encoder(TOKENIZER).eos_id, Encoder(stories).eos_id) == (1, 2)


def test_the_model_can_tell_this_end_token_from_all_others_and_not_its_own(stories: Path) -> None:
    rows = load_file(stories / "model.safetensors")["model.embed_tokens.weight"]  # (V, D), the output layer as well

    def nearest(token: int) -> float:
        """Distance of the most similar other token, relative to the length of the token's row."""
        distances = np.linalg.norm(np.delete(rows, token, axis=0) - rows[token], axis=1)
        return float(distances.min() / np.linalg.norm(rows[token]))

    assert nearest(Encoder(stories).eos_id) < 0.001
    assert nearest(Encoder(TOKENIZER).eos_id) > 0.5
