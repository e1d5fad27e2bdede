"""The data files that come with the presets, and what their data card says of them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from schemas.config import TokenizeConfig
from tasks.data.encoding import Encoder
from tasks.data.masks import RecordRows, make_rows
from tasks.data.readers import RecordReader
from tasks.data.records import Record
from tasks.data.sources import DataFile
from tasks.data.templates import TEMPLATES

DATA = Path(__file__).parents[2] / "flows" / "presets" / "data"


TOKENIZER = DATA / "stories_tokenizer"
FILES = ("ascend_qa.json", "identity_zh.json", "stories_qa.json")
CHINESE = "[\u4e00-\u9fff]"


def rows_of(name: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return rows


def is_chinese(row: dict[str, str]) -> bool:
    """Whether a row asks in Chinese: its instruction ends with a full-width mark."""
    return row["instruction"][-1] in "？！。"


def read(name: str) -> list[Record]:
    items = list(RecordReader(DataFile(DATA / name, name)))
    assert all(isinstance(item, Record) for item in items)
    return [item for item in items if isinstance(item, Record)]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read("stories_qa.json")


def test_the_data_card_gives_the_right_numbers(records: list[Record], stories: Path) -> None:
    card = (DATA / "README.md").read_text(encoding="utf-8")
    encoder = Encoder(stories)
    made, _ = make_rows(records, TEMPLATES["plain"], encoder, TokenizeConfig(max_length=10_000))
    longest = max(len(row.input_ids) for each in made if isinstance(each, RecordRows) for row in each.rows)
    answers = [record.turns[-1].text for record in records]
    words = [len(answer.split()) for answer in answers]
    empty = sum(not record.turns[0].input for record in records)
    numbers = [
        rf"\| rows \| {len(records)}, with {len(set(answers))} different answers \|",
        rf"empty in {empty} rows, a sentence of a story in {len(records) - empty}\)",
        rf"answers of {min(words)} to {max(words)} words; .* at most {longest} tokens a row",
    ]
    for number in numbers:
        assert re.search(number, card), number


def test_no_question_stands_twice(records: list[Record]) -> None:
    questions = [record.turns[0].whole_text.casefold() for record in records]
    assert len(set(questions)) == len(questions)


def test_every_text_is_a_plain_english_sentence(records: list[Record]) -> None:
    for record in records:
        for text in record.texts():
            assert re.fullmatch(r"([A-Z][A-Za-z ,'!?.]*[.!?])?", text), text
            assert "  " not in text


@pytest.mark.parametrize("name", FILES)
def test_every_record_has_its_three_keys_and_no_other_and_is_accepted(name: str) -> None:
    rows = rows_of(name)
    assert all(list(row) == ["instruction", "input", "output"] for row in rows)
    assert len(read(name)) == len(rows)


def test_the_card_of_the_ascend_rows_gives_the_right_numbers() -> None:
    rows = rows_of("ascend_qa.json")
    card = (DATA / "README.md").read_text(encoding="utf-8")
    chinese = sum(is_chinese(row) for row in rows)
    lengths = [len(row["output"]) for row in rows]
    for number in (
        f"| rows | {len(rows)}, every answer different |",
        f"(empty in {sum(not row['input'] for row in rows)} rows)",
        f"| {len(rows) - chinese} rows ask in English, {chinese} in Chinese",
        f"answers of {min(lengths)} to {max(lengths)} characters",
    ):
        assert number in card, number


@pytest.mark.parametrize("name", ["ascend_qa.json", "identity_zh.json"])
def test_no_row_stands_twice(name: str) -> None:
    rows = rows_of(name)
    questions = {(row["instruction"].casefold(), row["input"].casefold()) for row in rows}
    assert len(questions) == len(rows)


def test_ascend_answers_are_short_whole_and_all_different() -> None:
    rows = rows_of("ascend_qa.json")
    assert len({row["output"] for row in rows}) == len(rows)
    for row in rows:
        assert 30 <= len(row["output"]) <= 350
        assert row["output"][-1] in ".!?。！？"
        for text in row.values():
            assert text == text.strip()
            assert text.isprintable()


def test_ascend_rows_answer_in_the_language_that_they_are_asked_in() -> None:
    for row in rows_of("ascend_qa.json"):
        about_words = "Chinese" in row["instruction"] or "昇" in row["instruction"]  # translations hold both
        if is_chinese(row) or not about_words:
            assert bool(re.search(CHINESE, row["output"])) == is_chinese(row), row


def test_the_card_of_the_identity_rows_gives_the_right_numbers() -> None:
    answers = [row["output"] for row in rows_of("identity_zh.json")]
    name, author = (sum(word in answer for answer in answers) for word in ("{{name}}", "{{author}}"))
    card = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"| rows | {len(answers)}; `{{{{name}}}}` in {name} answers, `{{{{author}}}}` in {author} |" in card


@pytest.mark.parametrize(
    ("question", "name"), [("Who are you?", "mindtune's demo assistant"), ("你是谁？", "演示助手")]
)
def test_ascend_rows_say_who_the_assistant_is(question: str, name: str) -> None:
    rows = rows_of("ascend_qa.json")
    (answer,) = (row["output"] for row in rows if row["instruction"] == question)
    assert name in answer
    assert sum(name in row["output"] for row in rows) >= 10


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
