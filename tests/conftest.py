"""Fixtures that several tests share: the small checkpoint, the acceptance cases and the optional test data folder."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.config import LlmConfig
from schemas.manifest import StageJob, StageResult
from schemas.reports import Rejected, TokenizeReport
from schemas.tables import IGNORE_LABEL
from tasks.stages import StageContext

HERE = Path(__file__).parent
# Before anything imports Prefect: what it keeps (results, memory of runs) is not to land in the user's home.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="mindtune-prefect-")
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


@dataclass(frozen=True)
class Tokenized:
    """What the stage `tokenize` left, read back.

    Args:
        folder: the artifact.
        result: what the stage said at its end.
        train: (input_ids, labels) of each row.
        validation: the same, of the held-out rows.
        progress: (done, total, text) of each report.
    """

    folder: Path
    result: StageResult
    report: TokenizeReport
    rejected: list[Rejected]
    train: list[tuple[list[int], list[int]]]
    validation: list[tuple[list[int], list[int]]]
    progress: list[tuple[int, int, str]]

    def trained(self) -> list[list[int]]:
        """The labels of each training row that are trained on."""
        return [[label for label in labels if label != IGNORE_LABEL] for _, labels in self.train]

    def masked(self) -> list[list[int]]:
        """The ids of each training row that are not."""
        return [
            [i for i, label in zip(ids, labels, strict=True) if label == IGNORE_LABEL] for ids, labels in self.train
        ]


@pytest.fixture
def tokenize_files(stories: Path, tmp_path: Path) -> Callable[..., Tokenized]:
    """A function that runs the stage `tokenize` on files; keyword arguments are settings of `data` or `tokenize`."""
    from tasks import tokenize
    from tasks.data.shards import TokenRows

    def rows(folder: Path) -> list[tuple[list[int], list[int]]]:
        split = TokenRows(folder)
        return [(row.input_ids.tolist(), row.labels.tolist()) for row in map(split.row, range(len(split)))]

    def run(
        *files: Path | dict[str, Any], tokenizer: Path = stories, base: Path = stories, **settings: Any
    ) -> Tokenized:
        data = {
            name: settings.pop(name)
            for name in ("validation", "on_bad", "max_rejected_share", "replace")
            if name in settings
        }
        if "validation" not in data:
            data["validation_share"] = settings.pop("validation_share", 0)
        config = LlmConfig.model_validate(
            {
                "model": {"base": str(base), "tokenizer": str(tokenizer)},
                "data": {"train": [file if isinstance(file, dict) else str(file) for file in files], **data},
                "tokenize": {"template": "plain", **settings},
            }
        )
        folder = tmp_path / f"tokenized-{len(list(tmp_path.glob('tokenized-*')))}"
        folder.mkdir()
        job = StageJob(
            stage="tokenize",
            key="0" * 64,
            run="test",
            config=config,
            inputs={},
            sources={},
            output=str(folder),
            work=str(tmp_path),
            device="CPU",
        )
        progress: list[tuple[int, int, str]] = []
        result = tokenize.run(job, StageContext(lambda *report: progress.append(report), lambda: False))
        return Tokenized(
            folder,
            result,
            TokenizeReport.model_validate_json((folder / "report.json").read_text(encoding="utf-8")),
            [
                Rejected.model_validate_json(line)
                for line in (folder / "rejected.jsonl").read_text("utf-8").splitlines()
            ],
            rows(folder / "train"),
            rows(folder / "validation"),
            progress,
        )

    return run
