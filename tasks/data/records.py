"""Records: what readers produce, and templates and masks consume."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Turn:
    """What one side says.

    Args:
        role: who says it.
        text: what is said; Alpaca's instruction in user turns, which may be empty where there is an input.
        input: Alpaca's input, in user turns only: templates with an input heading need it apart.
    """

    role: Role
    text: str
    input: str = ""

    @property
    def whole_text(self) -> str:
        """Text and input on lines of their own, or the one of them that is not empty."""
        return "\n".join(part for part in (self.text, self.input) if part)


@dataclass(frozen=True)
class Record:
    """One accepted record.

    Args:
        source: name of its file.
        index: its place among the records of the file, from 0; broken lines, which hold none, are not counted.
        line: its line in a line-based file, from 1, blank ones counted; None elsewhere.
        turns: a conversation: perhaps a system turn, then user and assistant turns in alternation, the last by the
            assistant. Or a plain text: one assistant turn alone, which is trained whole and without a template.
        has_number: a field was a number in the file and is its text here.
    """

    source: str
    index: int
    line: int | None
    turns: tuple[Turn, ...]
    has_number: bool = False

    @property
    def is_plain_text(self) -> bool:
        """Whether it is a text alone, and no conversation."""
        return len(self.turns) == 1

    def texts(self) -> list[str]:
        """All texts in order, of a user turn the input after the text.

        Records that differ have different lists: with a conversation of n exchanges it has 3 n texts, one more with a
        system turn; a plain text is one text.
        """
        return [
            text for turn in self.turns for text in ((turn.text, turn.input) if turn.role == "user" else [turn.text])
        ]


def exchange(question: str, answer: str, question_input: str = "", system: str | None = None) -> tuple[Turn, ...]:
    """The turns of one question and its answer."""
    turns = (Turn("user", question, question_input), Turn("assistant", answer))
    return turns if system is None else (Turn("system", system), *turns)
