"""Token rows: prompt and answer side by side, and labels on the answer and its end token only.

    input_ids   [BOS]  p1 ... pn   a1 ... am   end
    labels      -100  -100 ... -100  a1 ... am   end

Where the answer begins is known from building the row, never searched for. A row is made only of a record whose prompt
and answer come back from their ids exactly; others are named with the reason. Nothing is cut: a record that does not
fit is left out, since a cut answer would teach to stop in mid-sentence or not at all.
"""

from dataclasses import dataclass

from schemas.errors import StageError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoder
from tasks.data.readers import Record
from tasks.data.templates import Template

TOO_LONG = "longer than max_length"
QUESTION_CHANGED = "the tokenizer can't write the question"
OUTPUT_CHANGED = "the tokenizer can't write the output"


@dataclass(frozen=True)
class TokenRow:
    """One row, not padded and not shifted.

    Args:
        input_ids: prompt, answer, end token.
        labels: as many; the id itself where it is trained on, -100 elsewhere.
    """

    input_ids: list[int]
    labels: list[int]


def make_row(record: Record, template: Template, encoder: Encoder, max_length: int) -> TokenRow | Rejected:
    """The row of a record, or why there is none.

    A tokenizer can't write a text whose ids decode to another one: it has no token for a character, or it normalises
    (lower case, composed accents), or it takes `▁` for a blank.

    Args:
        record: what to encode.
        template: how it becomes a prompt.
        encoder: the tokenizer.
        max_length: longest row, tokens.

    Raises:
        StageError: the labels would not be the answer and its end token (data.mask_broken).
    """
    prompt = encoder.prompt_ids(record, template)
    answer = encoder.answer_ids(record.output)
    end = encoder.end_ids(template)
    length = len(prompt) + len(answer) + len(end)
    if length > max_length:
        return _rejected(record, f"{TOO_LONG} ({length} tokens)")
    if not encoder.writes_prompt(prompt, record, template):
        return _rejected(record, QUESTION_CHANGED)
    if encoder.holds_control(answer) or encoder.decode(answer) != record.output:
        return _rejected(record, OUTPUT_CHANGED)
    row = TokenRow([*prompt, *answer, *end], [IGNORE_LABEL] * len(prompt) + answer + end)
    check_labels(row, answer + end, place_of(record))
    return row


def check_labels(row: TokenRow, wanted: list[int], place: str) -> None:
    """Refuse a row that would be trained on anything but the tokens named, or on fewer of them.

    Args:
        row: the row to check.
        wanted: the tokens to train on, answer and end.
        place: what an error calls the record.

    Raises:
        StageError: data.mask_broken.
    """
    start = len(row.input_ids) - len(wanted)
    if len(row.labels) != len(row.input_ids) or row.input_ids[start:] != wanted:
        problem = "its ids don't end with the answer and its end token"
    elif row.labels[start:] != wanted:
        problem = "its last labels are not the answer and its end token"
    elif any(label != IGNORE_LABEL for label in row.labels[:start]):
        problem = "part of its prompt has labels"
    else:
        return
    raise StageError("data.mask_broken", stage="tokenize", place=place, problem=problem)


def place_of(item: Record | Rejected) -> str:
    """How a person finds a record: its number from 0, its line from 1 where there is one, and its file."""
    index = item.index if isinstance(item, Record) else item.record
    line = "" if item.line is None else f"line {item.line}"
    if index is None:
        return f"{line.capitalize()} of {item.source}"
    return f"Record {index} ({line}) of {item.source}" if line else f"Record {index} of {item.source}"


def _rejected(record: Record, reason: str) -> Rejected:
    return Rejected(source=record.source, record=record.index, line=record.line, reason=reason)
