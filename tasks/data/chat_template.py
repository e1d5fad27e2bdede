"""The tokenizer's own chat template: which pieces it writes, without ever searching a user's text for their places.

A template is rendered with sentinels in place of the texts: Unicode noncharacters around a number, one for each turn.
What stands between the sentinels are the template's own pieces; they depend on the roles of the turns alone, so each
sequence of roles is laid out once. Prompts are rendered with add_generation_prompt, so that training and inference see
the same text before an answer, a `<think>` block included. An answer ends with the control token that the template puts
after it, blanks between them left out; where it puts none, with the tokenizer's end token.

A template can look into the texts, and some do: they strip blanks, or cut out what a model thought before it answered.
A second rendering with other sentinels, in blanks and line breaks, shows whose ends the template strips; such a turn is
stripped in training as in inference. Everything else is seen by rendering each conversation with its real texts too: if
that is not the same as the pieces with the texts between them, the conversation is refused.

Templates run in Jinja2's sandbox with what Transformers gives them: messages, add_generation_prompt, the special tokens
by name, raise_exception, strftime_now, tojson, loop controls and the generation block; blocks leave no line breaks.
strftime_now always writes 26 July 2024, the date that Llama 3.1's template falls back to, so that the same records give
the same rows on every day. Steps of loops and calls are counted, large numbers, products and joined texts refused, and
so is every power: a template that never ends, or fills the memory, is one by mistake. The sandbox keeps a template from
what is not its own; one that is made to waste memory can still do so, through formats and filters.
"""

import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from schemas.config import TemplateName
from schemas.errors import ConfigError, InputError
from tasks.data.encoding import Encoder
from tasks.data.records import Role, Turn
from tasks.data.templates import TEMPLATES, Control, Piece, Script, Template, TurnsError

FIXED_DATE = datetime.date(2024, 7, 26)
MOST_STEPS = 100_000  # of loops and calls in one rendering; real templates take a few dozen for each turn
LARGEST_NUMBER = 100_000  # that is written in a template, or a product: of numbers, or of characters
LONGEST_TEXT = 1 << 24  # characters of texts that are joined
_WIDE_FORMAT = re.compile(r"\d{6}|\*")
SHOWN = 200  # characters of an error in a template
CHANGES_TEXT = "the chat template changes its texts"

# blanks around a sentinel, and what a template does to a text that leaves some or none of them
_BEFORE: Mapping[str, Callable[[str], str]] = {
    "\n\u2003": str,
    "\u2003": lambda text: text.lstrip("\n"),
    "": str.lstrip,
}
_AFTER: Mapping[str, Callable[[str], str]] = {
    "\u2003\n": str,
    "\u2003": lambda text: text.rstrip("\n"),
    "": str.rstrip,
}


@dataclass(frozen=True)
class _Slot:
    """The place of a turn's text.

    Args:
        turn: which turn.
        before, after: what the template left of the blanks around it.
    """

    turn: int
    before: str
    after: str

    def fill(self, texts: Sequence[str]) -> str:
        """The turn's text as the template writes it."""
        return _AFTER[self.after](_BEFORE[self.before](texts[self.turn]))


@dataclass(frozen=True)
class _Rendering:
    """What the template writes for some roles: its own texts, and slots between them.

    Args:
        turns: how many of the conversation's turns it is rendered with.
        is_prompt: whether it is rendered with add_generation_prompt.
        parts: in order.
    """

    turns: int
    is_prompt: bool
    parts: tuple[str | _Slot, ...]

    def filled(self, texts: Sequence[str]) -> str:
        return "".join(part.fill(texts) if isinstance(part, _Slot) else part for part in self.parts)


@dataclass(frozen=True)
class _Layout:
    """How conversations of the same roles are written.

    Args:
        contexts, answers, can_train_all: as in `Script`, with slots in place of texts.
        renderings: what the real texts have to give as well.
    """

    contexts: tuple[tuple[Piece | _Slot, ...], ...]
    answers: tuple[_Slot, ...]
    can_train_all: bool
    renderings: tuple[_Rendering, ...]


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        encoder: the tokenizer.

    Raises:
        InputError: it has none (tokenizer.no_chat_template), or one that can't write a question and its answer
            (tokenizer.chat_template).
    """

    name: TemplateName = "tokenizer"

    def __init__(self, encoder: Encoder) -> None:
        if encoder.chat_template is None:
            raise InputError("tokenizer.no_chat_template", path=encoder.folder)
        self._encoder = encoder
        self._layouts: dict[tuple[Role, ...], _Layout | TurnsError] = {}
        self.end_token: str | None = None
        try:
            self._template = _compile(encoder.chat_template)
            self.end_token = self._find_end_token()
            self._lay_out(("user", "assistant"))
        except Exception as error:  # the compiled template is code of its own and can raise anything
            raise InputError("tokenizer.chat_template", path=encoder.folder, problem=_in_short(error)) from error

    def write(self, turns: Sequence[Turn]) -> Script:
        """As `Template.write`.

        Raises:
            TurnsError: the template refuses the turns, leaves one out, or does more with a text than strip it.
        """
        layout = self._layout(tuple(turn.role for turn in turns))
        texts = [turn.whole_text for turn in turns]
        for rendering in layout.renderings:
            messages = [
                {"role": turn.role, "content": text}
                for turn, text in zip(turns[: rendering.turns], texts, strict=False)
            ]
            if self._render(messages, rendering.is_prompt) != rendering.filled(texts):
                raise TurnsError(CHANGES_TEXT)
        contexts = tuple(
            tuple(piece.fill(texts) if isinstance(piece, _Slot) else piece for piece in context)
            for context in layout.contexts
        )
        return Script(contexts, tuple(slot.fill(texts) for slot in layout.answers), layout.can_train_all)

    def _layout(self, roles: tuple[Role, ...]) -> _Layout:
        if roles not in self._layouts:
            try:
                self._layouts[roles] = self._lay_out(roles)
            except TurnsError as error:
                self._layouts[roles] = error
        found = self._layouts[roles]
        if isinstance(found, TurnsError):
            raise TurnsError(str(found))
        return found

    def _lay_out(self, roles: tuple[Role, ...]) -> _Layout:
        questions = [place for place, role in enumerate(roles) if role == "user"]
        prompts = [self._rendering(roles[: place + 1], is_prompt=True) for place in questions]
        split = [self._split(prompt, roles) for prompt in prompts]
        written = [contexts[-1] for contexts, _ in split]  # as each answer is asked for
        remembered, answers = split[-1]  # as they stand before the last answer
        can_train_all = all(_same(*pair) for pair in zip(written, remembered, strict=True))
        renderings = prompts if can_train_all else prompts[-1:]
        if roles[-1] == "assistant":
            whole = self._rendering(roles, is_prompt=False)
            renderings = [*renderings, whole]
            answers = [
                *answers,
                *(part for part in whole.parts if isinstance(part, _Slot) and part.turn == len(roles) - 1),
            ]
        contexts = [self._pieces(context) for context in (written if can_train_all else remembered)]
        return _Layout(tuple(contexts), tuple(answers), can_train_all, tuple(renderings))

    def _rendering(self, roles: Sequence[Role], is_prompt: bool) -> _Rendering:
        bare = self._render(
            [{"role": role, "content": f"\ufdd0{turn}\ufdd1"} for turn, role in enumerate(roles)], is_prompt
        )
        padded = self._render(
            [{"role": role, "content": f"\n\u2003\ufdd2\ufdd3{turn}\ufdd4\u2003\n"} for turn, role in enumerate(roles)],
            is_prompt,
        )
        texts = re.split("\ufdd0([0-9]+)\ufdd1", bare)  # a text, a turn, a text, ...
        pattern = "".join(
            f"((?:\n?\u2003)?)\ufdd2\ufdd3{text}\ufdd4((?:\u2003\n?)?)" if place % 2 else re.escape(text)
            for place, text in enumerate(texts)
        )
        match = re.fullmatch(pattern, padded)
        if match is None:
            raise TurnsError(CHANGES_TEXT)
        turns = [int(text) for text in texts[1::2]]
        if sorted(turns) != list(range(len(roles))):
            raise TurnsError("the chat template leaves out or repeats a turn")
        blanks = match.groups()
        slots = [_Slot(turn, *blanks[2 * k : 2 * k + 2]) for k, turn in enumerate(turns)]
        parts = [part for pair in itertools.zip_longest(texts[::2], slots) for part in pair if part]
        return _Rendering(len(roles), is_prompt, tuple(parts))

    def _split(self, rendering: _Rendering, roles: Sequence[Role]) -> tuple[list[list[str | _Slot]], list[_Slot]]:
        """Contexts and answers of a prompt, without the end tokens that the template writes."""
        contexts: list[list[str | _Slot]] = [[]]
        answers: list[_Slot] = []
        for part in rendering.parts:
            if isinstance(part, _Slot) and roles[part.turn] == "assistant":
                answers.append(part)
                contexts.append([])
            elif isinstance(part, str) and answers and not contexts[-1] and self.end_token:
                following = part.lstrip()
                if not following.startswith(self.end_token):
                    raise TurnsError("the chat template ends earlier answers in another way than the last")
                contexts[-1].append(following.removeprefix(self.end_token))
            else:
                contexts[-1].append(part)
        return contexts, answers

    def _pieces(self, context: Sequence[str | _Slot]) -> tuple[Piece | _Slot, ...]:
        pieces: list[Piece | _Slot] = []
        for part in context:
            pieces += [part] if isinstance(part, _Slot) else self._encoder.split_controls(part)
        return tuple(pieces)

    def _find_end_token(self) -> str | None:
        last = self._rendering(("user", "assistant"), is_prompt=False).parts[-1]
        pieces = self._encoder.split_controls(last.lstrip()) if isinstance(last, str) else []
        return pieces[0].token if pieces and isinstance(pieces[0], Control) else None

    def _render(self, messages: Sequence[Mapping[str, str]], is_prompt: bool) -> str:
        from jinja2 import TemplateError

        self._template.environment.begin()
        try:
            text: str = self._template.render(
                messages=messages,
                add_generation_prompt=is_prompt,
                tools=None,
                documents=None,
                **self._encoder.special_tokens,
            )
        except TemplateError as error:
            raise TurnsError(f"the chat template refuses it ({_in_short(error)})") from error
        except Exception as error:  # the compiled template is code of its own and can raise anything
            raise TurnsError(f"the chat template fails ({_in_short(error)})") from error
        return text


def open_template(name: TemplateName, encoder: Encoder, system: str | None = None) -> Template:
    """A template by its name.

    Args:
        name: as in the configuration.
        encoder: the tokenizer, whose own template `tokenizer` is.
        system: the system turn that is to be put before conversations.

    Raises:
        InputError: as `ChatTemplate`.
        ConfigError: the template has no place for a system turn (tokenize.system_refused).
    """
    template = ChatTemplate(encoder) if name == "tokenizer" else TEMPLATES[name]
    if system is not None:
        try:
            template.write((Turn("system", system), Turn("user", "a"), Turn("assistant", "b")))
        except TurnsError as error:
            raise ConfigError("tokenize.system_refused", template=name, problem=error) from error
    return template


def _same(one: Sequence[str | _Slot], other: Sequence[str | _Slot]) -> bool:
    """Whether two contexts are equal, blanks before the answer aside."""

    def without_last_blanks(parts: Sequence[str | _Slot]) -> list[str | _Slot]:
        return [*parts[:-1], *(part.rstrip() if isinstance(part, str) else part for part in parts[-1:])]

    return without_last_blanks(one) == without_last_blanks(other)


def _in_short(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:SHOWN]


def _compile(source: str) -> Any:
    """The compiled template, a jinja2.Template.

    Source: what a template may use follows transformers 4.57, utils/chat_template_utils.py.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.visitor import NodeTransformer

    class GenerationBlock(Extension):  # type: ignore[misc]
        """`{% generation %}` marks what the assistant writes; its content is written as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
        """The sandbox, with a limit to what a template can compute."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})
        steps = 0

        def begin(self) -> None:
            """Count from the start: another rendering."""
            self.steps = 0

        def count_step(self) -> None:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise SecurityError(f"it takes more than {MOST_STEPS} steps")

        def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
            self.count_step()
            return super().call(context, function, *arguments, **named)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                return limited(super().call_binop(context, operator, left, right))
            if operator == "%":
                if isinstance(left, str) and _WIDE_FORMAT.search(left):
                    raise SecurityError("it has a wide format")
                return super().call_binop(context, operator, left, right)
            sizes = [value if isinstance(value, int | float) else len(value) for value in (left, right)]
            if operator == "**" or abs(sizes[0] * sizes[1]) > LARGEST_NUMBER:
                raise SecurityError("it has a power or a large product")
            return super().call_binop(context, operator, left, right)

    class Limits(NodeTransformer):  # type: ignore[misc]
        """Has steps of loops counted, and numbers and joined texts looked at."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802 the name is Jinja's
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return nodes.Filter(node, "limited", [], [], None, None, lineno=node.lineno)

        def visit_Const(self, node: Any) -> Any:  # noqa: N802
            if isinstance(node.value, int | float) and not abs(node.value) <= LARGEST_NUMBER:
                raise SecurityError("it has a large number")
            return node

    def limited(value: Any) -> Any:
        if isinstance(value, str | list | tuple) and len(value) > LONGEST_TEXT:
            raise SecurityError(f"it joins texts of more than {LONGEST_TEXT} characters")
        return value

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            environment.count_step()
            yield item

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # unlike Jinja's own, for no HTML page

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters |= {"tojson": to_json, "counted": counted, "limited": limited}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": FIXED_DATE.strftime}
    del environment.globals["lipsum"]  # as many paragraphs of nonsense as are asked for
    return environment.from_string(Limits().visit(environment.parse(source)))
