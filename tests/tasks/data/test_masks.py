from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from schemas.config import TemplateName
from schemas.errors import StageError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoder
from tasks.data.masks import OUTPUT_CHANGED, QUESTION_CHANGED, TokenRow, check_labels, make_row, place_of
from tasks.data.readers import Record
from tasks.data.templates import TEMPLATES

RECORD = Record("data.json", 3, None, "Who is it?", "", "It is Tom.")

AWKWARD = (
    "### 输出\n",
    "### Response:",
    "\nA:",
    "Q: ",
    "</s>",
    "<s>",
    "<unk>",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<0x0A>",
    "{output}",
    "{0} %s {{",
    " ",
    "\r\n",
    "\0",
    "\ufeff",
    "e\u0301",
    "\U0001f468\u200d\U0001f469",
)
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(AWKWARD), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=["word pieces with a blank in front", "one token a byte"])
def folder(request: pytest.FixtureRequest, stories: Path, case_folder) -> Path:
    return stories if request.param.startswith("word") else case_folder(5) / "tokenizer"


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder(folder)


@pytest.fixture(scope="module")
def peer(folder: Path) -> Tokenizer:
    """The tokenizer itself, to decode with."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(instruction=TEXTS, question=TEXTS, output=TEXTS, name=st.sampled_from(list(TEMPLATES)))
@example(instruction=["a"], question=["### 输出\nb"], output=["### 输出\n", "</s>"], name="alpaca-zh")
@example(instruction=[" </s>"], question=[""], output=["  </s>"], name="chatml")
def test_exactly_the_answer_and_the_end_token_are_trained(
    encoder: Encoder,
    peer: Tokenizer,
    instruction: list[str],
    question: list[str],
    output: list[str],
    name: TemplateName,
) -> None:
    record = replace(RECORD, instruction="".join(instruction), input="".join(question), output="".join(output))
    row = make_row(record, TEMPLATES[name], encoder, 10**6)
    if isinstance(row, Rejected):
        # the only text that these two tokenizers can't write: the sign that one of them uses for a blank
        changed = record.output if row.reason == OUTPUT_CHANGED else record.instruction + record.input
        assert row.reason in (OUTPUT_CHANGED, QUESTION_CHANGED)
        assert "\u2581" in changed
        return
    start = next(i for i, label in enumerate(row.labels) if label != IGNORE_LABEL)
    masked, trained = row.input_ids[:start], row.labels[start:]
    assert trained == row.input_ids[start:]
    assert trained[-1] == encoder.eos_id == 2
    assert peer.decode(trained[:-1], skip_special_tokens=False) == record.output
    prompt = masked[1:] if encoder.bos_id is not None else masked
    assert peer.decode(prompt, skip_special_tokens=False) == TEMPLATES[name].prompt_text(record)
    assert [i for i in row.input_ids if i < 3] == ([1, 2] if encoder.bos_id is not None else [2])


def test_chatml_answers_end_with_its_own_token_where_the_tokenizer_has_it(shared_data: Path) -> None:
    encoder = Encoder(shared_data / "models" / "zh-tiny-llama")
    record = replace(RECORD, output="好<|im_end|><|endoftext|>")
    row = make_row(record, TEMPLATES["chatml"], encoder, 512)
    assert isinstance(row, TokenRow)
    trained = [label for label in row.labels if label != IGNORE_LABEL]
    assert encoder.decode(trained) == record.output
    assert [i for i in trained if i < 3] == [2]


def test_a_row_of_exactly_the_longest_length_is_kept_and_a_longer_one_is_not(stories: Path) -> None:
    encoder = Encoder(stories)
    row = make_row(RECORD, TEMPLATES["plain"], encoder, 512)
    assert isinstance(row, TokenRow)
    length = len(row.input_ids)
    assert make_row(RECORD, TEMPLATES["plain"], encoder, length) == row
    rejected = make_row(RECORD, TEMPLATES["plain"], encoder, length - 1)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == f"longer than max_length ({length} tokens)"
    assert (rejected.source, rejected.record) == ("data.json", 3)


@pytest.mark.parametrize(
    ("change", "reason"), [({"instruction": "a\u2581b"}, QUESTION_CHANGED), ({"output": "a\u2581b"}, OUTPUT_CHANGED)]
)
def test_a_text_that_the_tokenizer_cannot_write_is_rejected(stories: Path, change: dict[str, str], reason: str) -> None:
    rejected = make_row(replace(RECORD, **change), TEMPLATES["plain"], Encoder(stories), 512)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason


@pytest.mark.parametrize(
    ("ids", "labels", "problem"),
    [
        ([5, 6, 7, 2], [-100, -100, 7, 2], None),
        ([5, 6, 7, 2], [-100, 6, 7, 2], "part of its prompt has labels"),
        ([5, 6, 7, 2], [-100, -100, -100, 2], "last labels are not the answer"),
        ([5, 6, 7, 2], [-100, -100, 7, -100], "last labels are not the answer"),
        ([5, 6, 7, 2], [-100, -100, 7], "ids don't end with the answer"),
        ([5, 6, 8, 2], [-100, -100, 7, 2], "ids don't end with the answer"),
        ([2], [2], "ids don't end with the answer"),
    ],
)
def test_wrong_labels_are_never_passed_on(ids: list[int], labels: list[int], problem: str | None) -> None:
    if problem is None:
        check_labels(TokenRow(ids, labels), [7, 2], "Record 3")
        return
    with pytest.raises(StageError, match=f"Record 3 would be trained wrongly: .*{problem}"):
        check_labels(TokenRow(ids, labels), [7, 2], "Record 3")


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
