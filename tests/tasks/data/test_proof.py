"""The proof sees each of the ways in which other chains are known to make wrong rows, and passes right rows."""

import json

import numpy as np
import pytest
from segments_from import join
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from schemas.config import TokenizeConfig
from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoder
from tasks.data.masks import RecordRows, TokenRow, make_rows
from tasks.data.proof import Fault, find_faults, split_packed
from tasks.data.records import Record, Turn, exchange
from tasks.data.templates import TEMPLATES

PLAIN = TEMPLATES["plain"]
TURNS = exchange("Who is it?", "//ab A: b.")
ANSWER = TURNS[-1].text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """One token a byte, but for `:/`, which a prompt's end and an answer's start can make together."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<pad>", *alphabet, ":/"])}
    tokenizer = Tokenizer(models.BPE(vocab, [(":", "/")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Encoder(folder)


@pytest.fixture(scope="module")
def row(encoder: Encoder) -> TokenRow:
    """The right row."""
    made = make_rows([Record("a", 0, None, TURNS)], PLAIN, encoder, TokenizeConfig(template="plain"))[0][0]
    assert isinstance(made, RecordRows)
    return made.rows[0]


def faults(encoder: Encoder, ids: list[int], labels: list[int], answers: list[str] | None = None) -> list[Fault]:
    return find_faults(join([ids], [labels]), encoder, encoder.eos_id, None if answers is None else [answers])


def masked(ids: list[int], start: int) -> list[int]:
    return [IGNORE_LABEL] * start + ids[start:]


def prompt_text() -> str:
    return PLAIN.write(TURNS[:1]).text()


def test_a_right_row_has_no_fault(encoder: Encoder, row: TokenRow) -> None:
    assert faults(encoder, row.input_ids, row.labels, [ANSWER]) == []
    assert faults(encoder, row.input_ids, row.labels) == []


def test_labels_that_are_shifted_in_the_data_are_seen(encoder: Encoder, row: TokenRow) -> None:
    (fault,) = [f for f in faults(encoder, row.input_ids, [*row.labels[1:], -100]) if f.name.startswith("labels")]
    assert fault.name == "labels are shifted"
    other = [label if label == IGNORE_LABEL else label + 1 for label in row.labels]
    assert "labels are other tokens" in {fault.name for fault in faults(encoder, row.input_ids, other)}


def test_masking_every_padding_id_takes_the_end_token_with_it_and_is_seen(encoder: Encoder, row: TokenRow) -> None:
    padding = encoder.eos_id  # pad = eos, as many chains set it
    ids = [*row.input_ids, *[padding] * 4]
    labels = [label if i != padding else IGNORE_LABEL for i, label in zip(ids, masked(ids, 0), strict=True)]
    labels[: row.labels.count(IGNORE_LABEL)] = [IGNORE_LABEL] * row.labels.count(IGNORE_LABEL)
    assert [fault.name for fault in faults(encoder, ids, labels)] == ["end token not trained"]


@pytest.mark.parametrize("padding", ["eos_id", "pad_id"])
def test_trained_padding_is_seen(encoder: Encoder, row: TokenRow, padding: str) -> None:
    extra = [getattr(encoder, padding)] * 3
    names = {fault.name for fault in faults(encoder, [*row.input_ids, *extra], [*row.labels, *extra])}
    assert "padding trained" in names


def test_a_boundary_inside_a_merged_token_is_seen(encoder: Encoder) -> None:
    tokenizer = Tokenizer.from_file(str(encoder.folder / "tokenizer.json"))
    ids = [*tokenizer.encode(prompt_text() + ANSWER).ids, encoder.eos_id]
    start = len(tokenizer.encode(prompt_text()).ids)
    assert tokenizer.id_to_token(ids[start - 1]) == ":/"  # half of it belongs to the answer
    (fault,) = faults(encoder, ids, masked(ids, start), [ANSWER])
    assert fault.name == "other text trained"
    assert fault.details == "['/ab A: b.'] instead of ['//ab A: b.']"


@pytest.mark.parametrize("find", ["first", "last"])
def test_a_boundary_found_by_searching_the_marker_is_seen(encoder: Encoder, find: str) -> None:
    turns = exchange("What does A: mean?", "It is A: b.")
    marker = encoder.answer_ids("A:")
    ids = [*encoder.prompt_ids(turns[:1], PLAIN), *encoder.answer_ids(turns[1].text), encoder.eos_id]
    places = [k for k in range(len(ids)) if ids[k : k + len(marker)] == marker]
    assert len(places) == 3
    start = places[0 if find == "first" else -1] + len(marker)
    (fault,) = faults(encoder, ids, masked(ids, start), [turns[1].text])
    assert fault.name == "other text trained"


def test_a_missing_end_token_is_seen(encoder: Encoder, row: TokenRow) -> None:
    (fault,) = faults(encoder, row.input_ids[:-1], row.labels[:-1], [ANSWER])
    assert fault.name == "end token missing"


def test_a_start_token_too_many_or_too_few_is_seen(encoder: Encoder, row: TokenRow) -> None:
    (twice,) = faults(encoder, [0, *row.input_ids], [IGNORE_LABEL, *row.labels], [ANSWER])
    (never,) = faults(encoder, row.input_ids[1:], row.labels[1:], [ANSWER])
    assert (twice.name, never.name) == ("start token twice", "start token missing")


def test_a_row_that_trains_nothing_is_seen(encoder: Encoder, row: TokenRow) -> None:
    nothing = [IGNORE_LABEL] * len(row.labels)
    assert [fault.name for fault in faults(encoder, row.input_ids, nothing)] == ["no label"]
    # nothing predicts the first token of a row
    assert "no label" in {fault.name for fault in faults(encoder, [1], [1])}


def test_a_control_token_inside_an_answer_is_seen(encoder: Encoder, row: TokenRow) -> None:
    ids, labels = row.input_ids.copy(), row.labels.copy()
    ids[-3] = labels[-3] = 0
    assert "control token trained" in {fault.name for fault in faults(encoder, ids, labels)}


def test_the_segment_of_a_fault_is_named(encoder: Encoder, row: TokenRow) -> None:
    wrong = [*row.labels[:-1], IGNORE_LABEL]
    segments = join([row.input_ids] * 3, [row.labels, wrong, row.labels])
    assert [(f.segment, f.name) for f in find_faults(segments, encoder, encoder.eos_id)] == [
        (1, "end token not trained")
    ]


def test_a_packed_row_is_seen_segment_by_segment(encoder: Encoder, row: TokenRow) -> None:
    length = len(row.input_ids)
    ids = np.array([*row.input_ids, *row.input_ids, 2, 2], np.int32)
    labels = np.array([*row.labels, *row.labels, -100, -100], np.int32)
    numbers = np.array([1] * length + [2] * length + [0, 0], np.int32)
    segments = split_packed(ids, labels, numbers)
    assert segments.starts.tolist() == [0, length, 2 * length]
    assert find_faults(segments, encoder, encoder.eos_id, [[ANSWER], [ANSWER]]) == []
    labels[-1] = 2
    with pytest.raises(ValueError, match="padding"):
        split_packed(ids, labels, numbers)


def test_pieces_of_a_plain_text_may_lack_start_and_end_only_where_texts_are_split(encoder: Encoder) -> None:
    settings = TokenizeConfig(template="plain", max_length=8, too_long="split")
    made = make_rows([Record("a", 0, None, (Turn("assistant", "Once upon a time"),))], PLAIN, encoder, settings)[0][0]
    assert isinstance(made, RecordRows)
    segments = join([row.input_ids for row in made.rows], [row.labels for row in made.rows])
    assert find_faults(segments, encoder, encoder.eos_id, open_ends=True) == []
    assert {fault.name for fault in find_faults(segments, encoder, encoder.eos_id)} == {
        "start token missing",
        "end token missing",
    }
