"""What a person sees on standard error while something runs: log lines, and one progress bar."""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET_SECONDS = 5.0  # between progress lines where there is no terminal


class TerminalHandler(logging.Handler):
    """Prints log records; those with a `progress` attribute move a bar on a terminal, or print a line now and then.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._last_line = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        progress = getattr(record, "progress", None)
        if progress is None:
            self._end_bar()
            style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
            self._console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
            return
        stage, done, total, text = progress
        if self._console.is_terminal:
            self._move_bar(stage, done, total, text)
        elif done == total or time.monotonic() - self._last_line > QUIET_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(f"{stage}: {done}/{total} {text}", markup=False, highlight=False, soft_wrap=True)

    def _move_bar(self, stage: str, done: int, total: int, text: str) -> None:
        if self._bar is None or stage != self._stage:
            self._end_bar()
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[text]}"), console=self._console, transient=True)
            self._task = self._bar.add_task(stage, total=total, text=text)
            self._stage = stage
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, text=text)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def log_to_terminal() -> None:
    """Show mindtune's log on standard error, once."""
    logger = logging.getLogger("mindtune")
    if not logger.handlers:
        logger.addHandler(TerminalHandler(Console(stderr=True)))
        logger.setLevel(logging.INFO)
        logger.propagate = False
