"""Fixtures that several tests share: the small checkpoint, the acceptance cases and the optional test data folder."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_DATA = Path(os.environ.get("MINDTUNE_DATA", HERE.parent.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of stories260K, a real pretrained Llama of 260,032 parameters (MIT)."""
    return HERE / "data" / "stories260K"


@pytest.fixture(scope="session")
def case_folder():
    """A function from the number of an acceptance case to the folder of its input files."""

    def folder(number: int) -> Path:
        (found,) = (HERE / "data" / "cases").glob(f"{number:02d}-*")
        return found

    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real test data; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"test data folder {SHARED_DATA} is absent (set MINDTUNE_DATA)")
    return SHARED_DATA
