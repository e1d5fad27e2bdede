"""Token rows: contexts and answers side by side, and labels on the answers and their end tokens only.

    input_ids   [BOS]  c1 ... cn   a1 ... am   end   c1 ... cn   a1 ... am   end
    labels      -100  -100 ... -100  a1 ... am   end  -100 ... -100  a1 ... am   end

Where an answer begins is known from building the row, never searched for. A row is made only of a record whose contexts
and answers come back from their ids exactly; others are named with the reason. A plain text is an answer with nothing
before it but what the tokenizer puts before a text.

What becomes of a record with more tokens than max_length (tokenize.too_long):

- `drop`: it is left out and listed with its length.
- `cut_prompt`: its questions lose characters at their beginnings, as few as needed: first those of the first question,
  its input before its text, then those of the next; each keeps its last character. Answers, system turns, headings and
  control tokens stay whole. A record that is then still too long, and a plain text, is left out.
- `split`: a plain text becomes pieces of about equal length; the first alone begins with what the tokenizer puts before
  a text, the last alone has an end token. A conversation becomes rows of whole exchanges, each with the system turn in
  front, filled from the last exchange backwards; where only the last answer is trained on, only the last of these rows
  is kept. A record with an exchange that is too long by itself is left out whole.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.config import TokenizeConfig
from schemas.errors import StageError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoded, Encoder, with_system
from tasks.data.proof import find_faults
from tasks.data.records import Record, Turn
from tasks.data.segments import Segments
from tasks.data.templates import Script, Template, TurnsError, plain_text

TOO_LONG = "longer than max_length"
QUESTION_CHANGED = "the tokenizer can't write the question"
OUTPUT_CHANGED = "the tokenizer can't write the output"
ONLY_LAST = "earlier answers can't be trained with this template"


@dataclass(frozen=True)
class TokenRow:
    """One row, not padded and not shifted.

    Args:
        parts: ids of contexts, answers and end tokens, in order.
        is_trained: of each part, whether it is trained on.
    """

    parts: tuple[list[int], ...]
    is_trained: tuple[bool, ...]

    @property
    def input_ids(self) -> list[int]:
        """All ids."""
        return list(itertools.chain.from_iterable(self.parts))

    @property
    def labels(self) -> list[int]:
        """As many; the id itself where it is trained on, -100 elsewhere."""
        found: list[int] = segments_of([self]).labels.tolist()
        return found


@dataclass(frozen=True)
class RecordRows:
    """What has become of a record that is used.

    Args:
        rows: at least one.
        is_cut: its questions were shortened.
        is_split: it is in several rows, or only its last exchanges are used.
    """

    rows: tuple[TokenRow, ...]
    is_cut: bool = False
    is_split: bool = False


def make_rows(
    records: Sequence[Record], template: Template, encoder: Encoder, settings: TokenizeConfig
) -> tuple[list[RecordRows | Rejected], Segments]:
    """For each record its rows, or why there are none; and all the rows in order, flat, as they were proved.

    Many records at once are faster than one by one.

    A tokenizer can't write a text whose ids decode to another one: it has no token for a character, or it normalises
    (lower case, composed accents), or it takes `▁` for a blank.

    Args:
        records: what to encode.
        template: how conversations are written.
        encoder: the tokenizer.
        settings: length, and what is done with longer records; which answers are trained on; the system turn.

    Raises:
        StageError: the labels of a row would not be its answers and their end tokens (data.mask_broken).
    """
    return _Maker(template, encoder, settings).make(records)


def segments_of(rows: Sequence[TokenRow]) -> Segments:
    """Rows as flat arrays, their origins not known."""
    parts = [part for row in rows for part in row.parts]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    is_trained = np.fromiter(itertools.chain.from_iterable(row.is_trained for row in rows), bool, len(parts))
    ids = np.fromiter(itertools.chain.from_iterable(parts), np.int32, int(lengths.sum()))
    labels = np.where(np.repeat(is_trained, lengths), ids, np.int32(IGNORE_LABEL))
    ends = np.cumsum([len(row.parts) for row in rows], dtype=np.int64)  # of each row, among the parts
    starts = np.append(0, np.cumsum(lengths))[np.append(0, ends)]
    return Segments(ids, labels, starts, np.full((len(rows), 2), -1))


def place_of(item: Record | Rejected) -> str:
    """How a person finds a record: its number from 0, its line from 1 where there is one, and its file."""
    index = item.index if isinstance(item, Record) else item.record
    line = "" if item.line is None else f"line {item.line}"
    if index is None:
        return f"{line.capitalize()} of {item.source}"
    return f"Record {index} ({line}) of {item.source}" if line else f"Record {index} of {item.source}"


class _BadRecordError(Exception):
    """Why a record can't be used."""


@dataclass(frozen=True)
class _Planned:
    """The rows of a record, and for each row the answers it has to train on; None: a piece of a plain text."""

    rows: RecordRows
    answers: tuple[Sequence[str] | None, ...]


class _Maker:
    def __init__(self, template: Template, encoder: Encoder, settings: TokenizeConfig) -> None:
        self._template, self._encoder, self._settings = template, encoder, settings
        self._longest = settings.max_length
        (self._end,) = encoder.end_ids(template)

    def make(self, records: Sequence[Record]) -> tuple[list[RecordRows | Rejected], Segments]:
        written = [self._write(record) for record in records]
        scripts = [script for script in written if isinstance(script, Script)]
        encoded = iter(self._encoder.encode(scripts, self._end))
        planned: list[_Planned | Rejected] = []
        for record, script in zip(records, written, strict=True):
            try:
                if isinstance(script, _BadRecordError):
                    raise script
                planned.append(self._plan(record, script, next(encoded)))
            except _BadRecordError as error:
                reason = str(error)
                planned.append(Rejected(source=record.source, record=record.index, line=record.line, reason=reason))
        segments = self._prove(records, planned)
        return [plan if isinstance(plan, Rejected) else plan.rows for plan in planned], segments

    def _write(self, record: Record) -> Script | _BadRecordError:
        if record.is_plain_text:
            return plain_text(record.turns[0].text)
        try:
            return self._script(with_system(record.turns, self._settings.system))
        except _BadRecordError as error:
            return error

    def _script(self, turns: Sequence[Turn]) -> Script:
        try:
            script = self._template.write(turns)
        except TurnsError as error:
            raise _BadRecordError(str(error)) from error
        if self._settings.train_on == "all" and len(script.answers) > 1 and not script.can_train_all:
            raise _BadRecordError(ONLY_LAST)
        return script

    def _plan(self, record: Record, script: Script, encoded: Encoded) -> _Planned:
        if not encoded.contexts_are_whole:
            raise _BadRecordError(QUESTION_CHANGED)
        if not encoded.answers_are_whole:
            raise _BadRecordError(OUTPUT_CHANGED)
        length = _length(encoded)
        if length > self._longest:
            found = self._fitted(record, encoded)
            if found is None:
                raise _BadRecordError(f"{TOO_LONG} ({length} tokens)")
            return found
        row, answers = self._row(script, encoded)
        return _Planned(RecordRows((row,)), (answers,))

    def _row(self, script: Script, encoded: Encoded) -> tuple[TokenRow, Sequence[str]]:
        first = len(encoded.answers) - 1 if self._settings.train_on == "last" else 0
        parts: list[list[int]] = []
        is_trained: list[bool] = []
        for k, (context, answer) in enumerate(zip(encoded.contexts, encoded.answers, strict=True)):
            parts += (context, answer, [self._end])
            is_trained += (False, k >= first, k >= first)
        return TokenRow(tuple(parts), tuple(is_trained)), script.answers[first:]

    def _fitted(self, record: Record, encoded: Encoded) -> _Planned | None:
        """The rows of a record that is too long, as the settings have it."""
        if self._settings.too_long == "cut_prompt" and not record.is_plain_text:
            return self._cut(list(with_system(record.turns, self._settings.system)))
        if self._settings.too_long == "split":
            if record.is_plain_text:
                return self._pieces(encoded)
            return self._runs(with_system(record.turns, self._settings.system))
        return None

    def _encode(self, turns: Sequence[Turn]) -> tuple[Script, Encoded]:
        script = self._script(turns)
        (encoded,) = self._encoder.encode([script], self._end)
        return script, encoded

    def _fits(self, turns: Sequence[Turn]) -> bool:
        return _length(self._encode(turns)[1]) <= self._longest

    def _cut(self, turns: list[Turn]) -> _Planned | None:
        for place in [place for place, turn in enumerate(turns) if turn.role == "user"]:
            for shortened in (_with_input, _with_text):
                turn = turns[place]

                def kept(count: int, place: int = place, turn: Turn = turn, shortened: _Shortened = shortened) -> bool:
                    turns[place] = shortened(turn, count)
                    return self._fits(turns)

                most = len(turn.input if shortened is _with_input else turn.text)
                if most > 1 and kept(1):
                    # the most characters that fit; one fits and all don't
                    least = 1
                    while most - least > 1:
                        middle = (least + most) // 2
                        least, most = (middle, most) if kept(middle) else (least, middle)
                    kept(least)
                    script, encoded = self._encode(turns)
                    if not (encoded.contexts_are_whole and encoded.answers_are_whole):
                        raise _BadRecordError(QUESTION_CHANGED)
                    row, answers = self._row(script, encoded)
                    return _Planned(RecordRows((row,), is_cut=True), (answers,))
        return None

    def _pieces(self, encoded: Encoded) -> _Planned:
        ids, trained_from = [*encoded.contexts[0], *encoded.answers[0], self._end], len(encoded.contexts[0])
        count = -(-len(ids) // self._longest)
        edges = np.linspace(0, len(ids), count + 1).astype(int).tolist()
        middles = [min(max(trained_from, a), b) for a, b in itertools.pairwise(edges)]
        rows = tuple(
            TokenRow((ids[a:middle], ids[middle:b]), (False, True))
            for (a, b), middle in zip(itertools.pairwise(edges), middles, strict=True)
        )
        return _Planned(RecordRows(rows, is_split=True), (None,) * count)

    def _runs(self, turns: Sequence[Turn]) -> _Planned | None:
        system = tuple(turn for turn in turns if turn.role == "system")
        talk = turns[len(system) :]
        made: list[tuple[Script, Encoded]] = []
        end = len(talk)
        while end:
            start = end
            while start and self._fits((*system, *talk[start - 2 : end])):
                start -= 2
            if start == end:
                return None
            made.append(self._encode((*system, *talk[start:end])))
            end = start if self._settings.train_on == "all" else 0
        rows, answers = zip(*(self._row(*each) for each in reversed(made)), strict=True)
        return _Planned(RecordRows(rows, is_split=True), answers)

    def _prove(self, records: Sequence[Record], planned: Sequence[_Planned | Rejected]) -> Segments:
        """All rows; raises where one would be trained wrongly."""
        plans = [(record, plan) for record, plan in zip(records, planned, strict=True) if isinstance(plan, _Planned)]
        rows = [(record, row) for record, plan in plans for row in plan.rows.rows]
        segments = segments_of([row for _, row in rows])
        answers = [texts for _, plan in plans for texts in plan.answers]
        open_ends = self._settings.too_long == "split"
        for fault in find_faults(segments, self._encoder, self._end, answers, open_ends):
            place = place_of(rows[fault.segment][0])
            raise StageError("data.mask_broken", stage="tokenize", place=place, problem=str(fault))
        return segments


_Shortened = Callable[[Turn, int], Turn]


def _with_input(turn: Turn, count: int) -> Turn:
    return replace(turn, input=turn.input[-count:])


def _with_text(turn: Turn, count: int) -> Turn:
    return replace(turn, text=turn.text[-count:])


def _length(encoded: Encoded) -> int:
    return sum(map(len, encoded.contexts)) + sum(map(len, encoded.answers)) + len(encoded.answers)
