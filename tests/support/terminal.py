"""A command on a terminal of its own (a pseudo-terminal): typing, keys, and what is shown."""

import contextlib
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE = 60.0  # seconds; loading and compiling a small model takes about 4 on two cores


class Terminal:
    """A running command with keyboard and screen.

    Args:
        command: program and arguments.
        environment: its variables; TERM is `dumb`, so that no escape sequences are shown.
        folder: where it runs.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.shown = ""
        self._read_until = 0
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], list(command), {**environment, "TERM": "dumb"})

    def type(self, text: str) -> None:
        """Press keys; a line ends with a newline, and the terminal echoes it."""
        os.write(self._screen, text.encode())

    def repeat(self, action: Callable[[], object], text: str) -> None:
        """Do something again and again until a text is shown.

        CPython 3.11 passes over a signal between the prompt and the waiting for keys, until the next one.
        """
        for _ in range(int(PATIENCE / 2)):
            action()
            with contextlib.suppress(AssertionError):
                self.wait_for(text, 2.0)
                return
        raise AssertionError(f"{text!r} was never shown")

    def wait_for(self, text: str, patience: float = PATIENCE) -> str:
        """What is shown next, up to and with a text."""
        deadline = time.monotonic() + patience
        while (place := self.shown.find(text, self._read_until)) < 0:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or not self._read():
                raise AssertionError(f"{text!r} was not shown, but {self.shown[self._read_until :]!r}")
        start, self._read_until = self._read_until, place + len(text)
        return self.shown[start : self._read_until]

    def end(self) -> int:
        """The exit code, once the command has ended."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            while select.select([self._screen], [], [], 0.5)[0] and self._read():
                pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it does not end")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended
        os.close(self._screen)

    def _read(self) -> bool:
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # the other side was closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
