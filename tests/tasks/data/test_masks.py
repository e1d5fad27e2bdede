import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.config import TokenizeConfig
from schemas.errors import StageError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data import masks
from tasks.data.encoding import Encoder
from tasks.data.masks import (
    ONLY_LAST,
    OUTPUT_CHANGED,
    QUESTION_CHANGED,
    RecordRows,
    TokenRow,
    make_rows,
    place_of,
    segments_of,
)
from tasks.data.records import Record, Turn, exchange
from tasks.data.segments import Segments
from tasks.data.templates import TEMPLATES, FixedTemplate, Script

RECORD = Record("data.json", 3, None, exchange("Who is it?", "It is Tom."))
TALK = (
    Turn("system", "Be kind."),
    *exchange("Who is it?", "It is Tom."),
    *exchange("Who else?", "Lily.", "Look at the park."),
    *exchange("And now?", "Ben."),
)


@pytest.fixture(scope="module")
def encoder(stories: Path) -> Encoder:
    return Encoder(stories)


def rows(
    turns: tuple[Turn, ...], encoder: Encoder, template: Any = TEMPLATES["chatml"], **settings: Any
) -> RecordRows | Rejected:
    settings = {"template": "chatml", "max_length": 4096, **settings}
    (made,), _ = make_rows([replace(RECORD, turns=turns)], template, encoder, TokenizeConfig(**settings))
    return made


def kept(*args: Any, **settings: Any) -> RecordRows:
    made = rows(*args, **settings)
    assert isinstance(made, RecordRows)
    return made


def trained(row: TokenRow, encoder: Encoder) -> list[str]:
    """The texts of the trained stretches, each of which ends with the end token."""
    stretches = []
    for is_trained, labels in itertools.groupby(row.labels, lambda label: label != IGNORE_LABEL):
        if is_trained:
            *ids, end = labels
            assert end == encoder.eos_id
            stretches.append(encoder.decode(ids))
    return stretches


def test_chatml_answers_end_with_its_own_token_where_the_tokenizer_has_it(shared_data: Path) -> None:
    encoder = Encoder(shared_data / "models" / "zh-tiny-llama")
    answer = "好<|im_end|><|endoftext|>"
    (row,) = kept(exchange("a", answer), encoder).rows
    labels = [label for label in row.labels if label != IGNORE_LABEL]
    assert encoder.decode(labels) == answer
    assert [i for i in labels if i < 3] == [2]


@pytest.mark.parametrize(("train_on", "answers"), [("all", ["It is Tom.", "Lily.", "Ben."]), ("last", ["Ben."])])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_answer_or_the_last_is_trained_and_each_has_its_end_token(
    encoder: Encoder, name: Any, train_on: Any, answers: list[str]
) -> None:
    turns = TALK if TEMPLATES[name].takes_system else TALK[1:]
    (row,) = kept(turns, encoder, TEMPLATES[name], train_on=train_on).rows
    assert trained(row, encoder) == answers
    assert row.input_ids.count(encoder.eos_id) == 3
    assert [i for i, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORE_LABEL] == [
        label for label in row.labels if label != IGNORE_LABEL
    ]
    starts = [k for k, i in enumerate(row.input_ids) if i == encoder.bos_id]
    assert starts[0] == 0
    # Llama 2 alone begins each exchange anew, right after an end token
    assert [row.input_ids[k - 1] for k in starts[1:]] == [encoder.eos_id] * (2 if name == "llama2" else 0)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_each_answer_stands_behind_the_prompt_that_inference_makes(encoder: Encoder, name: Any) -> None:
    turns = TALK if TEMPLATES[name].takes_system else TALK[1:]
    (row,) = kept(turns, encoder, TEMPLATES[name]).rows
    starts = [k for k in range(len(row.labels)) if row.labels[k] != IGNORE_LABEL == row.labels[k - 1]]
    asked = [k for k, turn in enumerate(turns) if turn.role == "user"]
    for start, last in zip(starts, asked, strict=True):
        assert row.input_ids[:start] == encoder.prompt_ids(turns[: last + 1], TEMPLATES[name])


def test_a_system_turn_is_put_before_conversations_that_have_none(encoder: Encoder) -> None:
    with_own = kept(TALK, encoder, system="Be quick.")
    assert with_own == kept(TALK, encoder)
    assert kept(TALK[1:], encoder, system="Be kind.") == with_own
    assert encoder.prompt_ids(TALK[1:2], TEMPLATES["chatml"], "Be kind.") == encoder.prompt_ids(
        TALK[:2], TEMPLATES["chatml"]
    )


def test_a_template_without_a_place_for_a_system_turn_rejects_the_record(encoder: Encoder) -> None:
    rejected = rows(TALK, encoder, TEMPLATES["plain"])
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "the template has no place for a system turn"


def test_a_plain_text_is_trained_whole_without_template_and_system_turn(encoder: Encoder) -> None:
    text = " Once upon a time\n</s> there was a girl. "
    (row,) = kept((Turn("assistant", text),), encoder, system="Be kind.").rows
    assert row.input_ids[0] == encoder.bos_id
    assert row.labels == [IGNORE_LABEL, *row.input_ids[1:]]
    assert trained(row, encoder) == [text]


def test_only_the_last_answer_is_trained_where_a_template_writes_earlier_ones_otherwise(encoder: Encoder) -> None:
    class Forgetful(FixedTemplate):
        def write(self, turns: Any) -> Script:
            return replace(super().write(turns), can_train_all=False)

    template = Forgetful("chatml", TEMPLATES["chatml"].context)
    rejected = rows(TALK, encoder, template)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == ONLY_LAST
    (row,) = kept(TALK, encoder, template, train_on="last").rows
    assert trained(row, encoder) == ["Ben."]
    assert kept(TALK[:3], encoder, template)


def test_many_records_at_once_give_the_rows_of_each_and_keep_their_order(encoder: Encoder) -> None:
    conversations = [TALK, exchange("a", "b"), (Turn("assistant", "c"),), exchange("a\u2581", "b"), TALK[:3]]
    records = [replace(RECORD, index=k, turns=turns) for k, turns in enumerate(conversations)]
    settings = TokenizeConfig(template="chatml")
    together, segments = make_rows(records, TEMPLATES["chatml"], encoder, settings)
    assert together == [make_rows([record], TEMPLATES["chatml"], encoder, settings)[0][0] for record in records]
    assert [item.record for item in together if isinstance(item, Rejected)] == [3]
    rows = [row for item in together if isinstance(item, RecordRows) for row in item.rows]
    assert segments.ids.tolist() == [i for row in rows for i in row.input_ids]
    assert segments.labels.tolist() == [label for row in rows for label in row.labels]
    assert segments.lengths.tolist() == [len(row.input_ids) for row in rows]
    none, nothing = make_rows([], TEMPLATES["chatml"], encoder, settings)
    assert (none, len(nothing)) == ([], 0)


def test_a_row_of_exactly_the_longest_length_is_kept_and_a_longer_one_is_not(encoder: Encoder) -> None:
    made = kept(RECORD.turns, encoder)
    length = len(made.rows[0].input_ids)
    assert kept(RECORD.turns, encoder, max_length=length) == made
    rejected = rows(RECORD.turns, encoder, max_length=length - 1)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == f"longer than max_length ({length} tokens)"
    assert (rejected.source, rejected.record) == ("data.json", 3)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (exchange("a\u2581b", "c"), QUESTION_CHANGED),
        (exchange("a", "c", "\u2581"), QUESTION_CHANGED),
        (exchange("a", "a\u2581b"), OUTPUT_CHANGED),
        ((*exchange("a", "\u2581"), *exchange("a", "b")), OUTPUT_CHANGED),
        ((*exchange("a", "b"), *exchange("a\u2581", "b")), QUESTION_CHANGED),
    ],
)
def test_a_text_that_the_tokenizer_cannot_write_is_rejected(
    encoder: Encoder, turns: tuple[Turn, ...], reason: str
) -> None:
    rejected = rows(turns, encoder)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason


def test_cutting_shortens_questions_from_the_left_by_as_little_as_needed(encoder: Encoder) -> None:
    turns = exchange("Tell me of the dog.", "It ran.", "word " * 30 + "dog")
    whole = kept(turns, encoder)
    longest = len(whole.rows[0].input_ids) - 20
    made = kept(turns, encoder, max_length=longest, too_long="cut_prompt")
    (row,) = made.rows
    assert (made.is_cut, made.is_split, whole.is_cut) == (True, False, False)
    assert longest - 2 <= len(row.input_ids) <= longest  # one character more would not fit
    assert trained(row, encoder) == ["It ran."]
    prompt = encoder.decode(row.input_ids[: row.labels.index(next(i for i in row.labels if i != IGNORE_LABEL))])
    assert "user\nTell me of the dog.\n" in prompt  # the input is cut before the text
    assert prompt.endswith("word dog<|im_end|>\n<|im_start|>assistant\n")


def test_cutting_takes_the_first_question_first_and_leaves_a_character_of_each(encoder: Encoder) -> None:
    turns = (Turn("system", "Be kind."), *exchange("abc " * 20 + "x", "One."), *exchange("def " * 20 + "y", "Two."))
    length = len(kept(turns, encoder).rows[0].input_ids)
    for less, first, second in ((20, "abc x", "def " * 20 + "y"), (100, "\nx<", "def y")):
        (row,) = kept(turns, encoder, max_length=length - less, too_long="cut_prompt").rows
        text = encoder.decode(row.input_ids)
        assert "Be kind." in text
        assert first in text
        assert second in text
        assert trained(row, encoder) == ["One.", "Two."]


def test_what_cutting_cannot_make_fit_is_left_out_with_its_length(encoder: Encoder) -> None:
    for turns in (exchange("a" * 50, "b" * 60), (Turn("assistant", "b" * 60),)):
        length = len(kept(turns, encoder).rows[0].input_ids)
        rejected = rows(turns, encoder, max_length=60, too_long="cut_prompt")
        assert isinstance(rejected, Rejected)
        assert rejected.reason == f"longer than max_length ({length} tokens)"


def test_a_plain_text_is_split_into_pieces_that_together_are_the_whole(encoder: Encoder) -> None:
    turns = (Turn("assistant", "Once upon a time 字 there was a girl. " * 10),)
    (whole,) = kept(turns, encoder).rows
    made = kept(turns, encoder, max_length=40, too_long="split")
    assert made.is_split
    assert len(made.rows) == -(-len(whole.input_ids) // 40)
    assert [i for row in made.rows for i in row.input_ids] == whole.input_ids
    assert [label for row in made.rows for label in row.labels] == whole.labels
    assert all(len(row.input_ids) <= 40 for row in made.rows)
    assert min(len(row.input_ids) for row in made.rows) >= 20
    assert [row.input_ids.count(encoder.eos_id) for row in made.rows] == [0] * (len(made.rows) - 1) + [1]


def test_a_conversation_is_split_into_whole_exchanges_with_the_system_turn(encoder: Encoder) -> None:
    def length(turns: tuple[Turn, ...]) -> int:
        return len(kept(turns, encoder).rows[0].input_ids)

    system = TALK[:1]
    longest = length((*system, *TALK[3:]))
    assert longest < length(TALK)
    made = kept(TALK, encoder, max_length=longest, too_long="split")
    assert made.is_split
    assert made.rows == (*kept(TALK[:3], encoder).rows, *kept((*system, *TALK[3:]), encoder).rows)
    last = kept(TALK, encoder, max_length=longest, too_long="split", train_on="last")
    assert last.rows == kept((*system, *TALK[3:]), encoder, train_on="last").rows
    assert last.is_split


def test_a_conversation_with_one_exchange_that_is_too_long_is_left_out_whole(encoder: Encoder) -> None:
    turns = (*TALK, *exchange("a", "b" * 200), *TALK[1:3])
    rejected = rows(turns, encoder, max_length=150, too_long="split")
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith("longer than max_length (")


def test_rows_that_would_be_trained_wrongly_are_never_passed_on(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(made: Any) -> Segments:
        segments = segments_of(made)
        return replace(segments, labels=np.append(segments.labels[1:], np.int32(IGNORE_LABEL)))

    monkeypatch.setattr(masks, "segments_of", shifted)
    with pytest.raises(
        StageError, match=r"Record 3 of data\.json would be trained wrongly: labels are shifted \(token"
    ):
        rows(TALK, encoder)


@pytest.mark.parametrize(
    ("item", "place"),
    [
        (RECORD, "Record 3 of data.json"),
        (replace(RECORD, line=5), "Record 3 (line 5) of data.json"),
        (Rejected(source="data.json", line=5, reason="not valid JSON"), "Line 5 of data.json"),
        (Rejected(source="data.json", record=0, reason="not an object"), "Record 0 of data.json"),
    ],
)
def test_a_place_names_record_line_and_file(item: Record | Rejected, place: str) -> None:
    assert place_of(item) == place
