"""Fixtures of runs through the command line, in artifact roots of their own."""

from pathlib import Path

import pytest
from command_line import QUICK, Answer, Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command line over an empty artifact root."""
    return Cli(tmp_path / "artifacts")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cli, Answer]:
    """A root in which the preset stories260k has run once with few steps, and what that run printed."""
    cli = Cli(tmp_path_factory.mktemp("finished") / "artifacts")
    answer = cli("run", "stories260k", *QUICK, "--json")
    assert answer.code == 0, answer.err
    return cli, answer
