"""Runs a stage in a child process and publishes what it left: the one way a stage is run.

A child process frees its memory and its device when it ends, a crash in it is an error with its last lines, and this
process never loads MindSpore. The child's output goes straight into a file, so it outlives this process; this process
reads along. No child outlives this process: the kernel kills it when the parent is gone, and it holds the key's lock
itself until then.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from schemas.errors import ChildError, MindtuneError, StageError
from schemas.manifest import ArtifactRef, RunSpec, StageJob, StageName, StageOutcome, StageResult
from tasks.child import ERROR, JOB, LOG, PROGRESS, RESULT, failed_log
from tasks.plan import Decision, Device, Planner, device_of
from tasks.stages import STAGES, Stage
from tasks.store import Store

log = logging.getLogger("mindtune.runner")

STOP_SECONDS = 25.0  # below the 30 s after which Prefect kills a cancelled flow
POLL_SECONDS = 0.1
TAIL_LINES = 15
CHILD = ("-m", "tasks.child")
_WARNING = " WARNING mindtune."  # in a log line of a stage's own

Listener = Callable[[str], None]
ProgressListener = Callable[[int, int, str], None]


class StageRun:
    """One stage of one run: decide, make if needed, and record the outcome.

    Args:
        stage: the stage.
        spec: the run.
        inputs: the artifacts that it takes, and `validate_env` where the device matters.
    """

    def __init__(self, stage: StageName, spec: RunSpec, inputs: Mapping[StageName, ArtifactRef]) -> None:
        self.stage: Stage = STAGES[stage]
        self.spec = spec
        self.store = Store(Path(spec.root))
        self.inputs = {name: inputs[name] for name in self.stage.takes}
        self._planner = Planner(self.store, spec.config, spec.force, spec.accept_code, deep=True)
        self._device: Device = (
            device_of(self.store, inputs["validate_env"]) if "validate_env" in inputs else self._planner.guess_device()
        )

    def decide(self) -> Decision:
        """Whether the artifact can be reused, its files checked by digest."""
        return self._planner.decide(self.stage, self.inputs, self._device)

    def reuse(self, ref: ArtifactRef, reason: str) -> ArtifactRef:
        """Record that the stage's artifact is reused."""
        manifest = self.store.read_manifest(self.store.root / ref.location)
        self._record("reused", reason, ref, 0.0, manifest.metrics)
        return ref

    def make(self, on_line: Listener, on_progress: ProgressListener) -> ArtifactRef:
        """Run the stage unless another run has made its artifact meanwhile; gives the reference.

        Args:
            on_line: called with each line of the child's log.
            on_progress: called with done, total and a short text.

        Raises:
            MindtuneError: the stage failed; the outcome is recorded as failed.
        """
        started = time.monotonic()
        decision = self.decide()
        assert decision.key is not None  # inputs are references, so the key is known
        try:
            with self.store.lock(self.stage.name, decision.key) as lock:
                decision = self.decide()
                if decision.ref is not None:
                    return self.reuse(decision.ref, "another run has just made it")
                log.info("%s: running (%s)", self.stage.name, decision.reason)
                ref = self._make_locked(decision, lock, started, on_line, on_progress)
        except BaseException as error:
            reason = error.message if isinstance(error, MindtuneError) else type(error).__name__
            self._record("failed", reason, None, time.monotonic() - started, {}, decision.key)
            raise
        manifest = self.store.read_manifest(self.store.open(ref))
        self._record("ran", decision.reason, ref, time.monotonic() - started, manifest.metrics)
        return ref

    def _make_locked(
        self, decision: Decision, lock: int, started: float, on_line: Listener, on_progress: ProgressListener
    ) -> ArtifactRef:
        assert decision.key is not None
        assert decision.key_document is not None
        work = self.store.prepare_work(self.stage.name, decision.key)
        job = StageJob(
            stage=self.stage.name,
            key=decision.key,
            run=self.spec.run,
            config=self.spec.config,
            inputs={name: str(self.store.open(ref)) for name, ref in self.inputs.items()},
            sources=decision.sources,
            output=str(work / "build"),
            work=str(work / "keep"),
            device=self._device,
        )

        def listen(line: str) -> None:
            if _WARNING in line:
                log.warning("%s: %s", self.stage.name, line.partition(_WARNING)[2].partition(": ")[2])
            on_line(line)

        result = run_child(job, work, lock, listen, on_progress)
        shutil.copyfile(work / LOG, work / "build" / LOG)
        result = result.model_copy(update={"volatile": (*result.volatile, LOG)})
        ref = self.store.publish(
            self.stage.name,
            decision.key_document,
            result,
            self.inputs,
            self.spec.run,
            time.monotonic() - started,
        )
        failed_log(work).unlink(missing_ok=True)
        return ref

    def _record(
        self,
        action: Literal["ran", "reused", "failed"],
        reason: str,
        ref: ArtifactRef | None,
        seconds: float,
        metrics: Mapping[str, float | int | str],
        key: str | None = None,
    ) -> None:
        level = logging.ERROR if action == "failed" else logging.INFO
        log.log(level, "%s: %s%s (%s)", self.stage.name, action, f" {ref.key[:12]}" if ref else "", reason)
        self.store.record_outcome(
            self.spec.run,
            StageOutcome(
                stage=self.stage.name,
                action=action,
                reason=reason,
                key=ref.key if ref else key,
                digest=ref.digest if ref else None,
                seconds=round(seconds, 3),
                path=str(self.store.root / ref.location) if ref else None,
                metrics=dict(metrics),
                inputs={name: given.digest for name, given in self.inputs.items()},
            ),
        )


def run_child(job: StageJob, work: Path, lock: int, on_line: Listener, on_progress: ProgressListener) -> StageResult:
    """Run a job in a child process of its own process group, reading its log and progress along.

    Args:
        job: what to run.
        work: folder for the job file, the log and the result.
        lock: file handle of the key's lock, held by the child as well.
        on_line: called with each line of the child's log.
        on_progress: called with done, total and a short text.

    Raises:
        ChildError: the stage raised an error.
        StageError: the child crashed (stage.crashed).
    """
    for name in (RESULT, ERROR, PROGRESS, LOG):
        (work / name).unlink(missing_ok=True)
    (work / JOB).write_text(job.model_dump_json(indent=1), encoding="utf-8")
    with (work / LOG).open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-P", *CHILD, str(work), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            cwd=work,
            env=child_environment(),
        )
    lines, progress = _Follower(work / LOG), _Follower(work / PROGRESS)

    def read_along() -> None:
        for line in lines.new_lines():
            on_line(line)
        latest = progress.new_lines()[-1:]
        for line in latest:
            document = json.loads(line)
            on_progress(document["done"], document["total"], document["text"])

    try:
        while child.poll() is None:
            read_along()
            time.sleep(POLL_SECONDS)
    finally:
        _stop(child)
    read_along()
    if child.returncode == 0:
        return StageResult.model_validate_json((work / RESULT).read_text(encoding="utf-8"))
    raise _failure(job, work, child.returncode)


def child_environment() -> dict[str, str]:
    """The environment of a child process that finds this project, and no module of the folder where it is started."""
    # The child runs in its work folder, since MindSpore writes files such as kernel_meta where it runs.
    project = str(Path(__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{path}" if path else project, "PYTHONUNBUFFERED": "1"}


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group: asked first, killed after STOP_SECONDS."""
    if child.poll() is None:
        log.info("stopping the stage's process %d", child.pid)
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    # also after a normal end: nothing that the stage started may stay behind
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _failure(job: StageJob, work: Path, code: int) -> MindtuneError:
    log_copy = failed_log(work)
    shutil.copyfile(work / LOG, log_copy)
    if (work / ERROR).is_file():
        left: dict[str, Any] = json.loads((work / ERROR).read_text(encoding="utf-8"))
        return ChildError(left["error"], left["exit_code"])
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    tail = "\n".join((work / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    return StageError("stage.crashed", stage=job.stage, how=how, tail=tail or "(no output)", log=log_copy)


class _Follower:
    """Reads the whole lines that another process appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]
