"""The six stages as Prefect tasks, cached by the artifact store.

The store decides what is reusable and Prefect shows it: the cache policy asks the store, and answers a key that Prefect
has a record for only while the artifact is whole. Prefect's records lie under `<root>/prefect`; deleting them loses
nothing, the policy writes the one that it needs.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from prefect import Task, get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import CachePolicy

from schemas.manifest import ArtifactRef, RunSpec, StageName
from tasks.runner import StageRun
from tasks.stages import STAGES

if TYPE_CHECKING:
    from prefect.context import TaskRunContext

log = logging.getLogger("mindtune.progress")

ABSENT = "absent"  # begins the key of a stage whose artifact is not there
DAY_SECONDS = 24 * 3600
PROGRESS_EVERY_PERCENT = 5.0  # a progress update costs a call to the server


@dataclass
class StorePolicy(CachePolicy):
    """Prefect's cache key of a stage: the store's key and digest while its artifact is whole, else a fresh one.

    Args:
        stage: the stage whose task has this policy.
    """

    stage: StageName = "validate_env"

    def compute_key(
        self, task_ctx: "TaskRunContext", inputs: dict[str, Any], flow_parameters: dict[str, Any], **_: Any
    ) -> str:
        """The cache key; a reused artifact is recorded in the run here, since the task's body is then skipped."""
        run = StageRun(self.stage, inputs["spec"], inputs["inputs"])
        decision = run.decide()
        if decision.ref is None:
            return f"{ABSENT}-{uuid4().hex}"
        ref = run.reuse(decision.ref, decision.reason)
        key = f"{ref.stage}-{ref.key}-{ref.digest}"
        if not task_ctx.result_store.exists(key):
            task_ctx.result_store.write(ref, key=key)
        return key


def _stage_task(stage: StageName) -> Task[..., ArtifactRef]:
    def make(spec: RunSpec, inputs: dict[StageName, ArtifactRef]) -> ArtifactRef:
        logger = get_run_logger()
        return StageRun(stage, spec, inputs).make(on_line=logger.info, on_progress=_ProgressReporter(stage))

    make.__name__ = make.__qualname__ = stage  # Prefect tells tasks apart by the function's name
    return Task(
        make,
        name=stage,
        description=STAGES[stage].title,
        cache_policy=StorePolicy(stage=stage),
        persist_result=True,
        result_serializer="json",
        cache_result_in_memory=False,  # an answer from memory would outlive the artifact
    )


_TASKS = {stage: _stage_task(stage) for stage in STAGES}


class Stages:
    """The stages of one run, each called with the artifacts that it takes.

    Args:
        spec: the run.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._records = Path(spec.root) / "prefect"
        self._records.mkdir(parents=True, exist_ok=True)
        for record in self._records.glob(f"{ABSENT}-*"):  # keys that nobody asks for again
            if time.time() - record.stat().st_mtime > DAY_SECONDS:
                record.unlink(missing_ok=True)

    def __call__(self, stage: StageName, *inputs: ArtifactRef) -> ArtifactRef:
        """Run a stage or reuse its artifact; called in the flow's own thread, so that a cancellation reaches it."""
        given = {ref.stage: ref for ref in inputs}
        return _TASKS[stage].with_options(result_storage=self._records)(self._spec, given)


class _ProgressReporter:
    """Shows progress on the run's page and, as log records with `progress`, to whoever listens in this process."""

    def __init__(self, stage: StageName) -> None:
        self._stage = stage
        self._artifact: Any = None
        self._shown = -PROGRESS_EVERY_PERCENT
        self._server_answers = True

    def __call__(self, done: int, total: int, text: str) -> None:
        log.info("%s %d/%d %s", self._stage, done, total, text, extra={"progress": (self._stage, done, total, text)})
        percent = 100.0 * done / max(total, 1)
        if not self._server_answers or (percent - self._shown < PROGRESS_EVERY_PERCENT and done != total):
            return
        self._shown = percent
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=self._stage.replace("_", "-"), description=text)
            else:
                update_progress_artifact(self._artifact, percent)
        except Exception as error:  # whatever a server that went away makes of it: the stage's work goes on
            self._server_answers = False
            log.warning("%s: progress is no longer shown by Prefect: %s", self._stage, error)
