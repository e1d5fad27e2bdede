"""Starting a run or one stage of it: plan first, then the flow only when something has to be made."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.embedded import prefect_api
from flows.settings import artifact_root, change_config, check_overrides_belong
from schemas.config import LlmConfig
from schemas.errors import InterruptionError, MindtuneError, StoreError
from schemas.manifest import ArtifactRef, RunRecord, RunSpec, StageName
from tasks.environment import check_resources
from tasks.locations import download_missing, not_downloaded
from tasks.plan import Decision, Planner, check_inputs
from tasks.runner import StageRun
from tasks.stages import STAGES
from tasks.store import Store

log = logging.getLogger("mindtune.run")


def run_job(config: LlmConfig, source: str, label: str, accept_code: bool = False) -> RunRecord:
    """Run a job: all that can be reused is, the rest is made by the flow.

    Args:
        config: the configuration.
        source: where it came from, for the record.
        label: short name, part of the run's name.
        accept_code: reuse artifacts that only a change of code would make again.

    Raises:
        MindtuneError: an input is unusable (then no run is recorded), or a stage failed (then the record says so).
    """
    root = artifact_root(config)
    log.info("artifacts: %s", root)
    _prepare(config, tuple(STAGES), root)
    store = Store(root)
    decisions = Planner(store, config, accept_code=accept_code).plan()
    if not _all_reused(decisions):
        check_resources(config.env, root)
    record = store.new_run(config, source, label)
    log.info("run: %s", record.run)
    spec = RunSpec(run=record.run, config=config, root=str(root), source=source, accept_code=accept_code)
    with _recorded(store, record.run, config):
        if _all_reused(decisions):
            _reuse(spec, decisions)
        else:
            with prefect_api(root):
                from flows.llm import finetune_llm

                finetune_llm(spec)
    return store.read_run(record.run)


def run_stage(root: Path, run: str, stage: StageName, overrides: Sequence[str], force: bool) -> RunRecord:
    """Run one stage of a run again, from the artifacts that the run has for the stages before it.

    Args:
        root: artifact root.
        run: name of the run, or `latest`.
        stage: the stage.
        overrides: `path.to.field=value` texts; settings of earlier stages are refused.
        force: make it again although it could be reused.

    Raises:
        MindtuneError: an earlier artifact is missing, an input is unusable, or the stage failed.
    """
    store = Store(root)
    record = store.read_run(run)
    check_overrides_belong(overrides, stage)
    config = change_config(record.config, overrides)
    _prepare(config, [stage], root)
    wanted: list[StageName] = [*STAGES[stage].takes]
    if STAGES[stage].on_device:
        wanted.append("validate_env")
    inputs = pinned_artifacts(store, record, wanted, stage)
    spec = RunSpec(
        run=record.run,
        config=config,
        root=str(root),
        source=record.source,
        force=(stage,) if force else (),
    )
    for name, why in record.stale_stages().items():
        if name in STAGES[stage].takes:
            log.warning("%s: made from a stale artifact: %s (%s)", stage, name, why)
    store.restart_run(record.run)
    with _recorded(store, record.run, config):
        stage_run = StageRun(stage, spec, {ref.stage: ref for ref in inputs})
        decision = stage_run.decide()
        if decision.ref is not None:
            stage_run.reuse(decision.ref, decision.reason)
        else:
            check_resources(config.env, root)
            with prefect_api(root):
                from flows.stage import rerun_stage

                rerun_stage(spec, stage, inputs)
    return store.read_run(record.run)


def _prepare(config: LlmConfig, stages: Sequence[StageName], root: Path) -> None:
    """Refuse what can be seen to be wrong, and download a base model that is on a hub and not yet on this machine."""
    check_inputs(config, stages)
    sources = {source for stage in stages for source in STAGES[stage].sources}
    if sources & {"base", "tokenizer"} and not_downloaded(config.model):
        check_resources(config.env, root)  # a host that can't run it is not to fetch gigabytes first
        download_missing(config.model)
        check_inputs(config, stages)


def _all_reused(decisions: Sequence[Decision]) -> bool:
    return all(decision.ref is not None for decision in decisions)


def _reuse(spec: RunSpec, decisions: Sequence[Decision]) -> None:
    """Record a run in which nothing has to be made, without Prefect."""
    made: dict[StageName, ArtifactRef] = {}
    for decision in decisions:
        assert decision.ref is not None
        StageRun(decision.stage, spec, made).reuse(decision.ref, decision.reason)
        made[decision.stage] = decision.ref


def pinned_artifacts(store: Store, record: RunRecord, wanted: Sequence[StageName], user: str) -> list[ArtifactRef]:
    """The artifacts that a run has for some stages, checked to be whole.

    Args:
        store: where they lie.
        record: the run.
        wanted: the stages.
        user: what wants them, for the message.

    Raises:
        StoreError: one has not been made, is gone or damaged (store.not_ready).
    """
    refs = []
    for name in wanted:
        outcome = record.outcome(name)
        ref = outcome.ref if outcome else None
        if ref is None:
            raise StoreError("store.not_ready", run=record.run, stage=name, wanted_by=user, why="it has not been made")
        try:
            store.open(ref)
        except StoreError as error:
            raise StoreError(
                "store.not_ready", run=record.run, stage=name, wanted_by=user, why=error.message
            ) from error
        refs.append(ref)
    return refs


@contextlib.contextmanager
def _recorded(store: Store, run: str, config: LlmConfig) -> Iterator[None]:
    """Mark the run as done with this configuration, or as failed, whatever happens."""
    try:
        with store.alive(run):
            yield
    except BaseException as error:
        known = as_known_error(error)
        with contextlib.suppress(OSError, StoreError):  # the first error is the one to show
            store.fail_run(run, known.as_document())
            known.run, known.root = run, str(store.root)
        if known is error:
            raise
        raise known from error
    store.finish_run(run, config)


def as_known_error(error: BaseException) -> MindtuneError:
    """An error with code, message and hint for any that can reach the end of a command."""
    if isinstance(error, MindtuneError):
        return error
    if isinstance(error, OSError):
        return MindtuneError("io.failed", problem=error)
    httpx = sys.modules.get("httpx")  # Prefect's client; where it was not imported the error can't be its
    if httpx is not None and isinstance(error, httpx.HTTPError):
        return MindtuneError("prefect.unreachable", url=os.environ.get("PREFECT_API_URL"), problem=error)
    if isinstance(error, Exception):
        log.error("unexpected error", exc_info=error)
        return MindtuneError("internal", kind=type(error).__name__, problem=error)
    return InterruptionError("interrupted")  # SIGINT, SIGTERM, or Prefect's signal of a cancelled flow
