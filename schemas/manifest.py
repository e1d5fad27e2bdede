"""What is written beside artifacts and about runs: references, manifests, stage jobs and run records.

Every document carries the version of its format; an unknown one is refused by name (`tasks/store.py`).
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.config import LlmConfig

MANIFEST_VERSION = 1
RUN_RECORD_VERSION = 1

StageName = Literal["validate_env", "tokenize", "train", "merge", "export", "evaluate"]
STAGES: tuple[StageName, ...] = ("validate_env", "tokenize", "train", "merge", "export", "evaluate")
Action = Literal["ran", "reused", "failed", "not_run"]
Metrics = dict[str, float | int | str]


class Frozen(BaseModel):
    """A value that is never changed after it was made and that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(Frozen):
    """A small reference to a published artifact; what tasks return."""

    stage: StageName
    key: str = Field(description="SHA-256 (hex) of the canonical JSON of all that the artifact depends on")
    digest: str = Field(description="SHA-256 (hex) over the payload, the part that is a function of the key")
    location: str = Field(description="folder below the artifact root, with forward slashes")


class FileEntry(Frozen):
    """One file of an artifact."""

    path: str = Field(description="below the artifact's folder, with forward slashes")
    size_bytes: int
    sha256: str
    payload: bool = Field(description="whether the file's bytes are a function of the key")


class Manifest(Frozen):
    """What an artifact is made of and made from; written last, so that a folder with a manifest is whole."""

    format_version: int = MANIFEST_VERSION
    stage: StageName
    key: str
    key_document: dict[str, Any] = Field(description="what the key is the SHA-256 of")
    digest: str
    payload: dict[str, str] = Field(description="digest of each payload part; the digest is over these")
    files: tuple[FileEntry, ...]
    inputs: dict[str, ArtifactRef] = Field(description="the artifacts of earlier stages that it was made from")
    metrics: Metrics = Field(default_factory=dict)
    run: str = Field(description="the run that made it")
    created: datetime = Field(description="UTC")
    seconds: float = Field(description="wall-clock time of the stage")


class StageJob(Frozen):
    """The job file that a stage's child process receives."""

    stage: StageName
    key: str
    run: str
    config: LlmConfig
    inputs: dict[str, str] = Field(description="absolute folder of each artifact that the stage takes")
    sources: dict[str, str] = Field(description="digest of each outside input (base, tokenizer, data) that was planned")
    output: str = Field(description="absolute folder that the stage writes its files to")
    work: str = Field(description="absolute folder that outlives a failed attempt (checkpoints); same key, same folder")
    device: Literal["CPU", "Ascend"]


class StageResult(Frozen):
    """What a stage's child process says at the end."""

    metrics: Metrics = Field(default_factory=dict)
    payload: dict[str, str] | None = Field(
        default=None, description="payload digests that the stage computed itself; None: those of the payload files"
    )
    volatile: tuple[str, ...] = Field(
        default=(), description="files whose bytes are not a function of the key (times, logs, plots)"
    )


class StageOutcome(Frozen):
    """What happened to one stage in a run."""

    stage: StageName
    action: Action
    reason: str
    key: str | None = None
    digest: str | None = None
    seconds: float = 0.0
    path: str | None = Field(default=None, description="absolute folder of the artifact")
    metrics: Metrics = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="digest of each earlier artifact it was made from")

    @property
    def ref(self) -> ArtifactRef | None:
        """The artifact, or None when the stage left none."""
        if self.key is None or self.digest is None:
            return None
        return ArtifactRef(stage=self.stage, key=self.key, digest=self.digest, location=f"{self.stage}/{self.key}")


class RunRecord(Frozen):
    """A run: its configuration, and which artifact each stage has."""

    format_version: int = RUN_RECORD_VERSION
    run: str
    source: str = Field(description="preset name or configuration file")
    created: datetime
    updated: datetime
    status: Literal["running", "done", "failed", "interrupted"] = Field(
        description="interrupted: its process ended without a word, by SIGKILL or a power cut"
    )
    config: LlmConfig
    stages: tuple[StageOutcome, ...]
    history: tuple[StageOutcome, ...] = Field(
        default=(), description="outcomes that a later rerun of the stage has replaced, oldest first"
    )
    error: dict[str, Any] | None = None

    def outcome(self, stage: StageName) -> StageOutcome | None:
        """The stage's present outcome, or None while it has none."""
        return next((outcome for outcome in self.stages if outcome.stage == stage), None)

    def stale_stages(self) -> dict[StageName, str]:
        """Stages whose artifact was made from another artifact than the run has now, each with the reason."""
        stale: dict[StageName, str] = {}
        digests = {outcome.stage: outcome.digest for outcome in self.stages}
        for name in STAGES:
            outcome = self.outcome(name)
            if outcome is None or outcome.digest is None:
                continue
            for parent, digest in outcome.inputs.items():
                if parent in stale:
                    stale[name] = f"{parent} is stale"
                elif digests.get(parent) != digest:  # type: ignore[call-overload]
                    stale[name] = f"{parent} was made again"
        return stale


class RunSpec(Frozen):
    """What a flow is started with: one run, its configuration and where its artifacts lie."""

    run: str
    config: LlmConfig
    root: str = Field(description="absolute artifact root")
    source: str = "api"
    force: tuple[StageName, ...] = Field(default=(), description="stages to make again although they could be reused")
    accept_code: bool = Field(default=False, description="reuse artifacts that only a change of code would make again")
