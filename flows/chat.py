"""Conversations with the exported model of a run; on a terminal lines come in, answers go out as they come."""

import contextlib
import logging
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any

from flows.run import pinned_artifacts
from schemas.errors import ConfigError, InputError, InterruptionError
from schemas.manifest import RunRecord
from tasks.answer import Conversation, Reply, Sampling
from tasks.plan import device_of
from tasks.store import Store

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"
PROMPT = "> "
CTRL_C = b"\x03"
LOCAL_FLAGS, CHARACTERS = 3, 6  # places in what termios gives

log = logging.getLogger("mindtune.chat")


def open_conversation(store: Store, run: str, system: str | None, **sampling: Any) -> tuple[RunRecord, Conversation]:
    """A conversation with the MindIR of a run, not yet loaded.

    Args:
        store: where the run is.
        run: its name, or `latest`.
        system: a system turn to begin with; None: that of the run.
        sampling: the fields of `tasks.answer.Sampling`; None stands for what the run was evaluated with.

    Raises:
        StoreError: there is no such run, or it has no whole MindIR.
        ConfigError: a setting is out of range.
    """
    record = store.read_run(run)
    if why := record.stale_stages().get("export"):
        log.warning("the exported model is stale: %s; run merge and export again", why)
    env, mindir = pinned_artifacts(store, record, ["validate_env", "export"], "generate")
    evaluated = record.config.evaluate
    chosen = {name: getattr(evaluated, name) if value is None else value for name, value in sampling.items()}
    conversation = Conversation(
        store.open(mindir),
        record.config.tokenize.template,
        device=device_of(store, env),
        sampling=Sampling(**chosen),
        system=record.config.tokenize.system if system is None else system,
    )
    return record, conversation


def write_piece(piece: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def end_answer(reply: Reply) -> None:
    """End the line of an answer, and tell when the model did not end it itself."""
    write_piece("\n")
    if not reply.stopped:
        log.info("cut after %d tokens (--max-new-tokens)", reply.tokens)


def chat(conversation: Conversation) -> None:
    """Talk until the user ends it; Ctrl-C ends the answer that is being made, not the program.

    Args:
        conversation: whom to talk to; what is said stays in its history.

    Raises:
        InterruptionError: the system asked the process to end (SIGTERM).
        StageError: the model's logits are not finite.
    """
    import readline  # noqa: F401  input() then edits the line and remembers earlier ones

    signal.signal(signal.SIGTERM, _end)  # the command line's own handler can't be told from Ctrl-C
    conversation.load()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # MindSpore left its own behind, which ends the process
    write_piece(f"{HELP}\n")
    while True:
        try:
            if not _one_turn(conversation):
                return
        except KeyboardInterrupt:
            write_piece("\n")
        except (ConfigError, InputError) as error:
            log.error("%s %s", error.message, error.hint)


def _one_turn(conversation: Conversation) -> bool:
    """Read a line and do what it says; False when it ends the conversation."""
    try:
        line = input(PROMPT)
    except EOFError:
        write_piece("\n")
        return False
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.forget()
    elif line.startswith("/"):
        write_piece(f"{HELP}\n")
    elif line.strip():
        with _keys_read(sys.stdin.fileno()) as pressed:

            def show(piece: str) -> None:
                write_piece(piece)
                if CTRL_C in pressed():
                    raise KeyboardInterrupt

            reply = conversation.reply(line, show)
        end_answer(reply)
    return True


@contextlib.contextmanager
def _keys_read(terminal: int) -> Iterator[Callable[[], bytes]]:
    """Let a terminal give its keys one by one, Ctrl-C among them and none of them shown.

    As a signal Ctrl-C would meet the handler that MindSpore 2.7 sets around every call of a graph, and which ends the
    process. Keys that are pressed meanwhile have no other effect.

    Args:
        terminal: its file descriptor.

    Yields:
        A function that gives the keys pressed since it was last called.
    """
    before = termios.tcgetattr(terminal)
    mode = termios.tcgetattr(terminal)
    mode[LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    mode[CHARACTERS][termios.VMIN] = mode[CHARACTERS][termios.VTIME] = 0  # reading does not wait
    termios.tcsetattr(terminal, termios.TCSADRAIN, mode)
    try:
        yield lambda: os.read(terminal, 1024)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _end(signum: int, frame: object) -> None:
    raise InterruptionError("interrupted")
