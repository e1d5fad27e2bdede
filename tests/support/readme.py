"""What the documents tell their readers to type: console blocks, and files shown in full."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
READMES = (PROJECT / "README.md", PROJECT / "README.zh-CN.md")
PAGES = (*READMES, *sorted((PROJECT / "docs").glob("*.md")))
_CONSOLE = re.compile(r"(?:<!-- run( finished)? -->\n)?^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line of a console block.

    Args:
        words: the command without its comment, split as a shell does.
        run: how a test runs it: "" in an empty root, "finished" in one with a finished run; None: not.
    """

    words: tuple[str, ...]
    run: str | None


def commands(page: Path) -> list[Command]:
    """The commands of a page, in order; lines of a console block without a dollar sign are output."""
    found = []
    for block in _CONSOLE.finditer(page.read_text(encoding="utf-8")):
        run = (block[1] or "").strip() if block[0].startswith("<!--") else None
        for line in block[2].splitlines():
            if line.startswith("$ "):
                found.append(Command(tuple(shlex.split(line[2:], comments=True)), run))
    return found


def shown_file(page: Path, language: str, beginning: str) -> str:
    """The one code block of a language that begins with some text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(beginning))
    return found
