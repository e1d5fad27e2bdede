"""Runs of the stage `tokenize` as the flow does it, in a child process, without Prefect."""

from pathlib import Path
from typing import Any

from schemas.config import LlmConfig
from schemas.manifest import ArtifactRef, RunSpec, StageOutcome
from tasks.runner import StageRun
from tasks.store import Store


class TokenizeRuns:
    """Runs of the stage `tokenize` over one artifact root.

    Args:
        root: artifact root.
        base: folder of the base model.
    """

    def __init__(self, root: Path, base: Path) -> None:
        self.store = Store(root)
        self._base = base

    def config(self, data: Path, **tokenize: Any) -> LlmConfig:
        return LlmConfig.model_validate(
            {
                "model": {"base": str(self._base)},
                "data": {"train": [str(data)], "validation_share": 0},
                "tokenize": {"template": "alpaca-zh", "max_length": 512, **tokenize},
            }
        )

    def __call__(self, data: Path, **tokenize: Any) -> tuple[ArtifactRef, StageOutcome]:
        """Tokenize a file, or reuse; gives the artifact and what happened."""
        config = self.config(data, **tokenize)
        record = self.store.new_run(config, "test", "case")
        store = Store(self.store.root)  # a run begins without memories
        stage = StageRun("tokenize", RunSpec(run=record.run, config=config, root=str(store.root)), {})
        decision = stage.decide()
        if decision.ref is not None:
            ref = stage.reuse(decision.ref, decision.reason)
        else:
            ref = stage.make(lambda _: None, lambda *_: None)
        outcome = store.read_run(record.run).outcome("tokenize")
        assert outcome is not None
        return ref, outcome

    def labels(self, ref: ArtifactRef) -> list[list[int]]:
        """The trained label ids of each row."""
        from tasks.data.shards import TokenRows

        rows = TokenRows(self.store.open(ref) / "train", by_segment=True)
        return [[int(label) for label in rows.row(index).labels if label != -100] for index in range(len(rows))]
