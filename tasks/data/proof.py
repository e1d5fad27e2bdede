"""Proof that rows train on exactly what they should, and the names of what can be wrong with them.

Looks at the rows alone, as they are stored: ids, labels and segments; and at the answers, where they are known. Faults
that need the answers to be seen: an answer that begins in the middle of a token which was merged with the end of the
prompt, and one whose start was found by searching for a marker. Plain NumPy, over many rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoder
from tasks.data.segments import IntArray, Segments

FaultName = Literal[
    "labels are shifted",
    "labels are other tokens",
    "no label",
    "end token not trained",
    "end token missing",
    "padding trained",
    "control token trained",
    "start token missing",
    "start token twice",
    "other text trained",
]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a segment.

    Args:
        name: what it is called.
        segment: which segment, from 0.
        details: what was found.
    """

    name: FaultName
    segment: int
    details: str

    def __str__(self) -> str:
        return f"{self.name} ({self.details})"


def split_packed(ids: IntArray, labels: IntArray, segment_ids: IntArray) -> Segments:
    """Segments of one row that may be packed; padding (segment 0) belongs to none and must have no label.

    Raises:
        ValueError: padding has a label, or stands between segments.
    """
    real = np.flatnonzero(segment_ids)
    count = len(real)
    if not np.array_equal(real, np.arange(count)) or (labels[count:] != IGNORE_LABEL).any():
        raise ValueError("padding stands before a segment or has labels")
    edges = np.flatnonzero(np.diff(segment_ids[:count])) + 1
    starts = np.concatenate([[0], edges, [count]] if count else [[0]])
    return Segments(ids[:count], labels[:count], starts, np.full((len(starts) - 1, 2), -1))


def find_faults(
    segments: Segments,
    encoder: Encoder,
    end_id: int,
    answers: Sequence[Sequence[str] | None] | None = None,
    open_ends: bool = False,
) -> list[Fault]:
    """All faults of some segments; an empty list is the proof.

    Right is: a label is the token itself, never shifted; every segment is trained on something beyond its first token,
    which nothing predicts; what is trained ends with the end token and holds no other control token; a segment begins
    with what the tokenizer puts before a text, once; what is trained decodes to exactly the answers.

    Args:
        segments: what to look at.
        encoder: the tokenizer that made them.
        end_id: the token that ends an answer.
        answers: of each segment, the texts that it should be trained on in order; None: not known.
        open_ends: whether plain texts may be in pieces (tokenize.too_long: split), of which only the first has a start
            token and only the last an end token.
    """
    return _Search(segments, encoder, end_id, open_ends).run(answers)


class _Search:
    def __init__(self, segments: Segments, encoder: Encoder, end_id: int, open_ends: bool) -> None:
        self._ids, self._labels, self._starts = segments.ids, segments.labels, segments.starts
        self._encoder, self._end, self._open_ends = encoder, end_id, open_ends
        self._count = len(segments)
        self._segment = np.repeat(np.arange(self._count), segments.lengths)  # (N,) segment of each token
        self._trained = self._labels != IGNORE_LABEL
        self._is_control = np.isin(self._ids, sorted(encoder.control_ids))
        self._is_first = np.zeros(len(self._ids), bool)
        self._is_first[self._starts[:-1][np.diff(self._starts) > 0]] = True
        before = np.append(False, self._trained[:-1]) & ~self._is_first
        after = np.append(self._trained[1:], False) & ~np.append(self._is_first[1:], True)
        self._run_starts = np.flatnonzero(self._trained & ~before)  # (R,) first token of each trained stretch
        self._run_ends = np.flatnonzero(self._trained & ~after)  # (R,) last token of it
        self._faults: list[Fault] = []

    def run(self, answers: Sequence[Sequence[str] | None] | None) -> list[Fault]:
        self._look_at_labels()
        self._look_at_ends()
        self._look_at_starts()
        if answers is not None:
            self._look_at_texts(answers)
        return self._faults

    def _add(self, name: FaultName, segment: int, details: str) -> None:
        self._faults.append(Fault(name, int(segment), details))

    def _look_at_labels(self) -> None:
        foreign = self._trained & (self._labels != self._ids)
        following = np.append(self._ids[1:], -1)
        for segment in np.unique(self._segment[foreign]):
            place = slice(self._starts[segment], self._starts[segment + 1] - 1)
            labels = self._labels[place]
            is_shifted = bool((labels == following[place])[labels != IGNORE_LABEL].all())
            first = int(np.flatnonzero(foreign & (self._segment == segment))[0])
            self._add(
                "labels are shifted" if is_shifted else "labels are other tokens",
                segment,
                f"token {first - place.start} is {self._ids[first]}, its label {self._labels[first]}",
            )
        counts = np.bincount(self._segment[self._trained & ~self._is_first], minlength=self._count)
        for segment in np.flatnonzero(counts == 0):
            self._add("no label", segment, "nothing in it is trained on")

    def _look_at_ends(self) -> None:
        at_end = np.zeros(len(self._ids), bool)
        at_end[self._run_ends] = self._ids[self._run_ends] == self._end
        for place in np.flatnonzero(self._trained & self._is_control & ~at_end):
            is_padding = self._ids[place] in (self._encoder.pad_id, self._end)
            name: FaultName = "padding trained" if is_padding else "control token trained"
            self._add(name, self._segment[place], f"{self._ids[place]} at {self._offset(place)}")
        for place in self._run_ends[~at_end[self._run_ends]]:
            segment = self._segment[place]
            is_last = place + 1 == self._starts[segment + 1]
            if not is_last and self._ids[place + 1] == self._end:
                self._add("end token not trained", segment, f"{self._end} at {self._offset(place + 1)}")
            elif not (self._open_ends and is_last and self._is_plain_text(segment)):
                self._add("end token missing", segment, f"trained up to {self._offset(place)}")

    def _look_at_starts(self) -> None:
        prefix = np.array(self._encoder.prefix, np.int32)
        if not len(prefix):
            return
        lengths = np.diff(self._starts)
        places = np.minimum(self._starts[:-1, None] + np.arange(len(prefix)), len(self._ids) - 1)
        has_start = (self._ids[places] == prefix).all(axis=1) & (lengths >= len(prefix))
        for segment in np.flatnonzero(~has_start):
            if not (self._open_ends and self._trained[self._starts[segment]] and self._is_plain_text(segment)):
                self._add("start token missing", segment, f"begins with {self._ids[self._starts[segment]]}")
        bos = self._encoder.bos_id
        if bos is None:
            return
        is_bos = self._ids == bos
        twice = is_bos[:-1] & is_bos[1:] & (self._segment[:-1] == self._segment[1:])
        if bos == self._end:  # an end token and the start token of the next question stand beside each other
            twice &= self._is_first[:-1]
        for place in np.flatnonzero(twice):
            self._add("start token twice", self._segment[place], f"{bos} at {self._offset(place)} and after it")

    def _look_at_texts(self, answers: Sequence[Sequence[str] | None]) -> None:
        ends = self._run_ends + (self._ids[self._run_ends] != self._end)
        runs = [self._ids[start:end].tolist() for start, end in zip(self._run_starts, ends, strict=True)]
        found: list[list[str]] = [[] for _ in range(self._count)]
        for segment, text in zip(self._segment[self._run_starts], self._encoder.decode_all(runs), strict=True):
            found[segment].append(text)
        for segment, (texts, wanted) in enumerate(zip(found, answers, strict=True)):
            if wanted is not None and texts != list(wanted):
                self._add("other text trained", segment, f"{_short(texts)} instead of {_short(wanted)}")

    def _is_plain_text(self, segment: int) -> bool:
        """Whether all of a segment is trained, but for what the tokenizer puts before a text."""
        start, prefix = int(self._starts[segment]), self._encoder.prefix
        if self._ids[start : start + len(prefix)].tolist() == prefix and not self._trained[start]:
            start += len(prefix)
        return bool(self._trained[start : self._starts[segment + 1]].all())

    def _offset(self, place: int) -> int:
        return int(place - self._starts[self._segment[place]])


def _short(texts: Sequence[str]) -> str:
    shown = [text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}" for text in texts[:3]]
    return ascii(shown) if len(texts) <= 3 else f"{len(texts)} texts, {shown!a}, ..."
