"""Fixtures of the acceptance cases."""

from pathlib import Path

import pytest
from tokenize_runs import TokenizeRuns


@pytest.fixture
def tokenize_runs(tmp_path: Path, stories: Path) -> TokenizeRuns:
    """Runs of `tokenize` over an empty artifact root."""
    return TokenizeRuns(tmp_path / "root", stories)
