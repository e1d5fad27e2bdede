"""The errors that mindtune raises on purpose.

An error is a code and its facts. The words stand in `schemas/messages/<language>.yaml`, one entry a code with a
`message` and a `hint` (what to do next), so that a second language is a second file. A test holds every code that the
source raises against that file.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNFIT = 3
EXIT_INTERRUPTED = 130


@cache
def message_templates(language: str = "en") -> Mapping[str, Mapping[str, str]]:
    """The message and the hint of every error code in one language."""
    text = (resources.files("schemas") / "messages" / f"{language}.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


class MindtuneError(Exception):
    """An error with a code, the facts that fill its message, and the stage it belongs to.

    Args:
        code: an entry of the message file, for example `data.file_missing`.
        stage: the stage that the error belongs to, where there is one.
        facts: the values that the message names.
    """

    exit_code = EXIT_FAILED

    def __init__(self, code: str, *, stage: str | None = None, **facts: Any) -> None:
        self.code = code
        self.stage = stage
        self.run: str | None = None  # the run that failed with it, once it has been recorded
        self.root: str | None = None  # where that run is recorded
        self.facts = facts
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled whole: Prefect keeps the exceptions of failed tasks."""
        return _restore, (type(self), self.__dict__.copy(), self.args)

    @property
    def message(self) -> str:
        """What was wrong, the value, and what was expected."""
        return self._fill("message")

    @property
    def hint(self) -> str:
        """What to do next."""
        return self._fill("hint")

    def _fill(self, part: str) -> str:
        return message_templates()[self.code][part].format(stage=self.stage, **self.facts).strip()

    def as_document(self) -> dict[str, Any]:
        """The form that `--json` prints and that a child process hands to its parent."""
        return {"code": self.code, "message": self.message, "stage": self.stage, "hint": self.hint}


def _restore(kind: type[MindtuneError], state: dict[str, Any], args: tuple[Any, ...]) -> MindtuneError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(MindtuneError, ValueError):
    """A setting that is unknown, out of range, or contradicts another."""

    exit_code = EXIT_BAD_INPUT


class InputError(MindtuneError, ValueError):
    """A file that a run starts from (data, tokenizer, base model) is missing or unusable."""

    exit_code = EXIT_BAD_INPUT


class HostError(MindtuneError):
    """The host cannot run what was asked for."""

    exit_code = EXIT_UNFIT


class StoreError(MindtuneError):
    """An artifact or a run record is missing, damaged, or written by an unknown version."""


class StageError(MindtuneError):
    """A stage ran and failed."""


class InterruptionError(MindtuneError):
    """The user or the system asked the process to end (SIGINT, SIGTERM)."""

    exit_code = EXIT_INTERRUPTED


class ChildError(StageError):
    """An error that a stage raised in its child process, with the texts it had there.

    Args:
        document: what `as_document` gave in the child.
        exit_code: the exit code that belongs to it.
    """

    def __init__(self, document: Mapping[str, Any], exit_code: int) -> None:
        self._document = dict(document)
        self.exit_code = exit_code
        super().__init__(str(document["code"]), stage=document["stage"])

    @property
    def message(self) -> str:
        """The message as the child wrote it."""
        return str(self._document["message"])

    @property
    def hint(self) -> str:
        """The hint as the child wrote it."""
        return str(self._document["hint"])
