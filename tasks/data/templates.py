"""How a conversation becomes contexts and answers, built apart from each other.

A context is a sequence of pieces: what stands between one answer's end token and the next answer. A piece of text is
encoded as ordinary characters whatever stands in it; a `Control` is one token of the tokenizer, where the tokenizer has
it. So a heading, a brace or `<|im_end|>` in a user's text is just text, and nobody ever searches a rendered prompt for
the place where an answer begins. Texts are joined, never formatted. An answer is the assistant's turn itself, followed
by the end token.

    alpaca      Below is an instruction ... ### Instruction: ... ### Input: ... ### Response:
                (without an input another first sentence, and no input heading)
                a system turn takes the place of the first sentence; a further question begins with a blank line
                and its headings
    alpaca-zh   ### 指令\\n{instruction}\\n\\n### 输入\\n{input}\\n\\n### 输出\\n
                (the input heading stays without an input)
                a system turn stands before it with a blank line; a further question begins with a blank line
    chatml      <|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n
                (an answer ends with <|im_end|> where the tokenizer has it, else with its end token)
                a system turn is a turn like the others; \\n between an answer and the next question
    qwen        chatml with Qwen2.5's own system turn where the conversation has none
    plain       Q: {question}\\nA:
                no place for a system turn; a further question begins on a new line
    llama2      [INST] {question} [/INST]
                a system turn stands in the first question as <<SYS>>\\n{system}\\n<</SYS>>\\n\\n; each further question
                begins with the start token, as in Meta's own training
    llama3      <|start_header_id|>user<|end_header_id|>\\n\\n{question}<|eot_id|>
                <|start_header_id|>assistant<|end_header_id|>\\n\\n (no line break between the two)
                (an answer ends with <|eot_id|>) a system turn is a turn like the others
    tokenizer   the tokenizer's own, see `chat_template`

A question is text and input on lines of their own, or the one of them that is not empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.config import TemplateName
from tasks.data.records import Turn

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # Qwen2.5's chat template


@dataclass(frozen=True)
class Control:
    """A piece of a context that is a token of its own.

    Args:
        token: its text, for example `<|im_start|>`; encoded as ordinary characters where the tokenizer lacks the token.
    """

    token: str


START = Control("")  # the tokenizer's start token; nothing where the tokenizer puts none before a text

Piece = str | Control


@dataclass(frozen=True)
class Script:
    """A conversation as a template writes it.

    Args:
        contexts: what stands before each answer, the k-th between the end token of answer k - 1 and answer k; one more
            than there are answers where the last turn is a question. Texts that meet are not yet joined.
        answers: the assistant's turns.
        can_train_all: False where an earlier answer stands behind another context here than it is written behind, so
            that only the last answer can be trained on.
    """

    contexts: tuple[tuple[Piece, ...], ...]
    answers: tuple[str, ...]
    can_train_all: bool = True

    def text(self, end: str = "") -> str:
        """All of it as people read it.

        Args:
            end: what an answer ends with.
        """
        answers = [answer + end for answer in self.answers] + [""]
        return "".join(_text(context) + answer for context, answer in zip(self.contexts, answers, strict=False))


class TurnsError(Exception):
    """Why a template has no form for some turns."""


class Template(Protocol):
    """One way to write conversations."""

    @property
    def name(self) -> TemplateName:
        """Its name in the configuration."""
        ...

    @property
    def end_token(self) -> str | None:
        """Text of the token that ends an answer where the tokenizer has it; None: the tokenizer's end token."""
        ...

    def write(self, turns: Sequence[Turn]) -> Script:
        """Contexts and answers of a conversation.

        Args:
            turns: perhaps a system turn, then user and assistant turns in alternation.

        Raises:
            TurnsError: the template has no form for them.
        """
        ...


@dataclass(frozen=True)
class FixedTemplate:
    """A template that is written here.

    Args:
        name: its name in the configuration.
        context: the pieces of one question from the system turn's text, the user turn, and whether it is the first. A
            system turn comes with the first question only.
        end_token: text of the token that ends an answer where the tokenizer has it; None: the tokenizer's end token.
        takes_system: whether there is a place for a system turn.
    """

    name: TemplateName
    context: Callable[[str | None, Turn, bool], tuple[Piece, ...]]
    end_token: str | None = None
    takes_system: bool = True

    def write(self, turns: Sequence[Turn]) -> Script:
        """As `Template.write`."""
        system = turns[0].text if turns[0].role == "system" else None
        if system is not None and not self.takes_system:
            raise TurnsError("the template has no place for a system turn")
        questions = [turn for turn in turns if turn.role == "user"]
        contexts = [self.context(None if k else system, turn, not k) for k, turn in enumerate(questions)]
        return Script(tuple(contexts), tuple(turn.text for turn in turns if turn.role == "assistant"))


def plain_text(text: str) -> Script:
    """A text without a conversation: nothing stands before it."""
    return Script(((),), (text,))


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.token if isinstance(piece, Control) else piece for piece in pieces)


_IM_START, _IM_END = Control("<|im_start|>"), Control("<|im_end|>")
_START_HEADER, _END_HEADER, _EOT = Control("<|start_header_id|>"), Control("<|end_header_id|>"), Control("<|eot_id|>")


def _alpaca(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    """The prompts of Stanford Alpaca, letter for letter, so that models tuned on it see what they know.

    Source: tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT; nothing follows `### Response:` there.
    """
    if system is not None:
        head = system
    elif not is_first:
        head = ""
    elif user.input:
        head = (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request."
        )
    else:
        head = (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        )
    asked = ("\n\n### Input:\n", user.input) if user.input else ()
    return (head, "\n\n### Instruction:\n", user.text, *asked, "\n\n### Response:")


def _alpaca_zh(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    head = "" if is_first and system is None else f"{system or ''}\n\n"
    return (head, "### 指令\n", user.text, "\n\n### 输入\n", user.input, "\n\n### 输出\n")


def _chatml(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    head: tuple[Piece, ...] = () if is_first else ("\n",)
    if system is not None:
        head = (_IM_START, "system\n", system, _IM_END, "\n")
    return (*head, _IM_START, "user\n", user.whole_text, _IM_END, "\n", _IM_START, "assistant\n")


def _qwen(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    return _chatml(QWEN_SYSTEM if is_first and system is None else system, user, is_first)


def _plain(_: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    return ("Q: " if is_first else "\nQ: ", user.whole_text, "\nA:")


def _llama2(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    """Source: meta-llama/llama, llama/generation.py, chat_completion; texts are not stripped here."""
    head: tuple[Piece, ...] = ("[INST] ",) if is_first else (START, "[INST] ")
    if system is not None:
        head = (*head, "<<SYS>>\n", system, "\n<</SYS>>\n\n")
    return (*head, user.whole_text, " [/INST]")


def _llama3(system: str | None, user: Turn, is_first: bool) -> tuple[Piece, ...]:
    """Source: meta-llama/llama3, llama/tokenizer.py, ChatFormat; texts are not stripped here."""
    head: tuple[Piece, ...] = ()
    if system is not None:
        head = (_START_HEADER, "system", _END_HEADER, "\n\n", system, _EOT)
    asked = (_START_HEADER, "user", _END_HEADER, "\n\n", user.whole_text, _EOT)
    return (*head, *asked, _START_HEADER, "assistant", _END_HEADER, "\n\n")


TEMPLATES: dict[TemplateName, FixedTemplate] = {
    template.name: template
    for template in (
        FixedTemplate("alpaca", _alpaca),
        FixedTemplate("alpaca-zh", _alpaca_zh),
        FixedTemplate("chatml", _chatml, end_token=_IM_END.token),
        FixedTemplate("qwen", _qwen, end_token=_IM_END.token),
        FixedTemplate("plain", _plain, takes_system=False),
        FixedTemplate("llama2", _llama2),
        FixedTemplate("llama3", _llama3, end_token=_EOT.token),
    )
}

# texts of all control tokens of these templates
MARKERS = frozenset(control.token for control in (_IM_START, _IM_END, _START_HEADER, _END_HEADER, _EOT))
