"""Answers from an exported model, alone or in a conversation: what `mindtune generate` does."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from schemas.config import TemplateName
from schemas.errors import ConfigError, InputError
from tasks.data.records import Turn, exchange
from tasks.data.templates import TurnsError

if TYPE_CHECKING:
    from tasks.models.generation import Generator

log = logging.getLogger("mindtune.answer")


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        max_new_tokens: longest answer, tokens.
        temperature: 0 is greedy.
        top_p: share of the probability that is kept.
        seed: seed of the draws; each answer begins with it.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Reply:
    """One answer.

    Args:
        text: all of it; with what was shown as it came, letter for letter.
        tokens: how many, without the end token.
        stopped: whether the model ended it, not the length.
        first_token_seconds: from the question to the first token.
        tokens_per_second: of the tokens after the first.
    """

    text: str
    tokens: int
    stopped: bool
    first_token_seconds: float
    tokens_per_second: float


class Conversation:
    """A conversation with the MindIR of an `export` artifact; it knows its history.

    Where history, question and answer no longer fit the KV cache together, or the template can't write an earlier
    answer, the oldest exchanges are dropped, with a warning in the log. The cache keeps what it holds of the history
    from one answer to the next.

    Args:
        mindir: folder of the artifact.
        template: how turns become a prompt; the one that the model was trained with.
        device: where to compute.
        sampling: how answers are drawn.
        system: the system turn that everything begins with; None: none.

    Raises:
        ConfigError: a setting is out of range, or the system turn is no text (generate.setting), or the template has no
            place for it (tokenize.system_refused).
        StoreError: the folder was written in another format version.
    """

    def __init__(
        self,
        mindir: Path,
        template: TemplateName,
        *,
        device: Literal["CPU", "Ascend"],
        sampling: Sampling,
        system: str | None = None,
    ) -> None:
        from tasks.data.chat_template import open_template
        from tasks.data.encoding import Encoder
        from tasks.models.generation import read_mindir_spec
        from tasks.models.sampling import check_settings

        check_settings(sampling.temperature, sampling.top_p)
        if system is not None:
            _check_text("The system turn", system)
        self._mindir = mindir
        self._device = device
        self._sampling = sampling
        self._system = system
        self._encoder = Encoder(mindir)
        self._template = open_template(template, self._encoder, system)
        self._spec = read_mindir_spec(mindir)
        self._generator: Generator | None = None
        self._exchanges: list[tuple[str, str]] = []

    def load(self) -> "Generator":
        """Load and compile the model, once; `reply` does so where it has not been done."""
        if self._generator is None:
            from tasks.models.device import use_device
            from tasks.models.generation import Generator

            log.info("loading the model")
            use_device(self._device)
            self._generator = Generator.from_mindir(self._mindir)
        return self._generator

    def forget(self) -> None:
        """Begin anew: no history."""
        self._exchanges.clear()

    def reply(self, question: str, show: Callable[[str], object]) -> Reply:
        """Answer a question, knowing those before.

        Args:
            question: the user's turn.
            show: called after each token, and at the end, with the text that is certain since, often empty. What it
                raises ends the answer; what was answered until then stays in the history.

        Raises:
            ConfigError: the question is no text (generate.setting).
            InputError: the question alone does not fit the cache with its answer (generate.too_long), or the template
                can't write it (generate.turns); the history is as before then.
        """
        from tasks.data.decoding import TextStream

        _check_text("The prompt", question)
        ids = self._prompt(question)
        generator = self.load()
        stream = TextStream(self._encoder.decode)

        try:
            made = generator.generate(
                ids,
                max_new_tokens=self._sampling.max_new_tokens,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                seed=self._sampling.seed,
                stop_ids={*self._encoder.end_ids(self._template), self._encoder.eos_id},
                on_token=lambda token: show(stream.push(token)),
                reuse=True,
            )
            show(stream.end())
        finally:
            if stream.ids:
                self._exchanges.append((question, stream.text))
        return Reply(
            text=stream.text,
            tokens=len(made.ids),
            stopped=made.stopped,
            first_token_seconds=round(made.first_token_seconds, 4),
            tokens_per_second=round(made.decoded / made.decode_seconds, 1) if made.decode_seconds > 0 else 0.0,
        )

    def _prompt(self, question: str) -> list[int]:
        """Ids of the whole prompt; drops the oldest exchanges that have no room."""
        from tasks.models.generation import check_prompt

        new, cache = self._sampling.max_new_tokens, self._spec.cache_length
        check_prompt(self._ids([], question), new, cache, self._spec.vocabulary)
        dropped = 0
        while not self._can_write(question):
            del self._exchanges[0]
            dropped += 1
        if dropped:
            log.warning("the template can't write an earlier answer: forgot the oldest %s", _counted(dropped))
        dropped = 0
        while len(ids := self._ids(self._exchanges, question)) + new > cache:
            del self._exchanges[0]
            dropped += 1
        if dropped:
            log.warning("no room in the KV cache of %d tokens: forgot the oldest %s", cache, _counted(dropped))
        return ids

    def _can_write(self, question: str) -> bool:
        """Whether the template has a form for the history: it can refuse what the model answered, e.g. `</think>`."""
        try:
            self._ids(self._exchanges, question)
        except InputError:
            if not self._exchanges:
                raise
            return False
        return True

    def _ids(self, exchanges: Sequence[tuple[str, str]], question: str) -> list[int]:
        turns = [turn for asked, answered in exchanges for turn in exchange(asked, answered)]
        try:
            return self._encoder.prompt_ids([*turns, Turn("user", question)], self._template, self._system)
        except TurnsError as error:
            raise InputError("generate.turns", template=self._template.name, problem=error) from error


def _counted(count: int) -> str:
    return "question and answer" if count == 1 else f"{count} questions and answers"


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the terminal sent bytes that are no text
        raise ConfigError("generate.setting", name=name, wanted="UTF-8 text", value=ascii(text)) from error
