"""The command line as a user calls it, in a process of its own, over one artifact root."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
STAGES = ["validate_env", "tokenize", "train", "merge", "export", "evaluate"]
QUICK = ["--set", "train.max_steps=12", "--set", "train.warmup_steps=2", "--set", "evaluate.max_new_tokens=8"]


@dataclass(frozen=True)
class Answer:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)

    def actions(self) -> dict[str, str]:
        return {stage["stage"]: stage["action"] for stage in self.document["stages"]}


@dataclass(frozen=True)
class Cli:
    """The command line over one artifact root, called in a folder."""

    root: Path
    folder: Path = PROJECT

    def environment(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return {**clean, "MINDTUNE_ARTIFACTS": str(self.root), **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from flows.cli import main; main()", *arguments]

    def __call__(self, *arguments: str, **environment: str) -> Answer:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment(**environment),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)


def imported_packages(errors: str) -> set[str]:
    """Top-level packages that a command imported, from what PYTHONPROFILEIMPORTTIME made it print."""
    names = (line.rsplit("|", 1)[-1].strip() for line in errors.splitlines() if line.startswith("import time:"))
    return {name.split(".")[0] for name in names}
