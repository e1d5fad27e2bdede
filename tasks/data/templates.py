"""How a record becomes a prompt and an answer, built apart from each other.

A prompt is a sequence of pieces. A piece of text is encoded as ordinary characters whatever stands in it; a `Control`
is one token of the tokenizer, where the tokenizer has it. So a heading, a brace or `<|im_end|>` in a user's text is
just text, and nobody ever searches a rendered prompt for the place where the answer begins. Texts are joined, never
formatted. The answer is the record's output itself, followed by the end token.

    alpaca      Below is an instruction ... ### Instruction: ... ### Input: ... ### Response:
                (without an input another first sentence, and no input heading)
    alpaca-zh   ### 指令\\n{instruction}\\n\\n### 输入\\n{input}\\n\\n### 输出\\n
                (the input heading stays without an input)
    chatml      <|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n
                (no system turn; the answer ends with <|im_end|> where the tokenizer has it, else with its end token)
    plain       Q: {question}\\nA:

A question is instruction and input on lines of their own, or the one of them that is not empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from schemas.config import TemplateName


@dataclass(frozen=True)
class Control:
    """A piece of a prompt that is a token of its own.

    Args:
        token: its text, for example `<|im_start|>`; encoded as ordinary characters where the tokenizer lacks the token.
    """

    token: str


Piece = str | Control


class Question(Protocol):
    """What a prompt is made of; a record is one."""

    @property
    def instruction(self) -> str:
        """What is asked."""
        ...

    @property
    def input(self) -> str:
        """What it is asked about; empty where there is nothing."""
        ...


@dataclass(frozen=True)
class Asked:
    """A question that comes from no record, such as a prompt of the configuration."""

    instruction: str
    input: str = ""


@dataclass(frozen=True)
class Template:
    """One way to write prompts.

    Args:
        name: its name in the configuration.
        prompt: the pieces of a question's prompt, texts that meet not yet joined.
        end_token: text of the token that ends an answer where the tokenizer has it; None: the tokenizer's end token.
    """

    name: TemplateName
    prompt: Callable[[Question], tuple[Piece, ...]]
    end_token: str | None = None

    def prompt_text(self, question: Question) -> str:
        """The prompt as people read it."""
        return "".join(piece.token if isinstance(piece, Control) else piece for piece in self.prompt(question))


_IM_START = Control("<|im_start|>")
_IM_END = Control("<|im_end|>")


def _one_text(question: Question) -> str:
    return "\n".join(text for text in (question.instruction, question.input) if text)


def _alpaca(question: Question) -> tuple[Piece, ...]:
    """The prompts of Stanford Alpaca, letter for letter, so that models tuned on it see what they know.

    Source: tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT; nothing follows `### Response:` there.
    """
    if question.input:
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n### Instruction:\n",
            question.instruction,
            "\n\n### Input:\n",
            question.input,
            "\n\n### Response:",
        )
    return (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\n",
        question.instruction,
        "\n\n### Response:",
    )


def _alpaca_zh(question: Question) -> tuple[Piece, ...]:
    return ("### 指令\n", question.instruction, "\n\n### 输入\n", question.input, "\n\n### 输出\n")


def _chatml(question: Question) -> tuple[Piece, ...]:
    return (_IM_START, "user\n", _one_text(question), _IM_END, "\n", _IM_START, "assistant\n")


def _plain(question: Question) -> tuple[Piece, ...]:
    return ("Q: ", _one_text(question), "\nA:")


TEMPLATES: dict[TemplateName, Template] = {
    template.name: template
    for template in (
        Template("alpaca", _alpaca),
        Template("alpaca-zh", _alpaca_zh),
        Template("chatml", _chatml, end_token=_IM_END.token),
        Template("plain", _plain),
    )
}

MARKERS = frozenset((_IM_START.token, _IM_END.token))  # texts of all control tokens of the templates
