"""Texts put in the place of others in every record: a name for `{{name}}`, before anything else sees the record."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tasks.data.records import Record, Turn


class Replacer:
    """Replaces texts in records, literally and all at once: what was put in is not searched again.

    Where several texts begin at the same place the longest is replaced.

    Args:
        replacements: what is put in, by the text that it takes the place of.

    `counts` says how often each text was replaced so far, 0 for one that was not met.
    """

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self._replacements = dict(replacements)
        longest_first = sorted(self._replacements, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.counts: Counter[str] = Counter(dict.fromkeys(self._replacements, 0))

    def __call__(self, record: Record) -> Record:
        """The record with the texts replaced; the same one where there is nothing to replace."""
        if not self._replacements:
            return record
        return replace(record, turns=tuple(map(self._in_turn, record.turns)))

    def _in_turn(self, turn: Turn) -> Turn:
        return replace(turn, text=self._in_text(turn.text), input=self._in_text(turn.input))

    def _in_text(self, text: str) -> str:
        return self._pattern.sub(self._put_in, text)

    def _put_in(self, match: re.Match[str]) -> str:
        self.counts[match[0]] += 1
        return self._replacements[match[0]]
