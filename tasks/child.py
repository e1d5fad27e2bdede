"""The child process in which a stage runs: `python -m tasks.child FOLDER PARENT_PID`.

The folder holds `job.json` (a StageJob). The child leaves `result.json` (a StageResult) or `error.json` there, and
appends one line to `progress.jsonl` for each report of progress. Its standard output is the stage's log.
"""

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from schemas.errors import EXIT_FAILED, MindtuneError, StageError
from schemas.manifest import StageJob, StageResult
from tasks.files import write_atomically
from tasks.stages import STAGES, StageContext

JOB, RESULT, ERROR, PROGRESS, LOG = "job.json", "result.json", "error.json", "progress.jsonl", "log.txt"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def failed_log(work: Path) -> Path:
    """Where the log of the last failed attempt on a key is kept, beside its work folder."""
    return work.with_name(f"{work.name[:16]}-failed.log")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and end at once if it already has.

    SIGKILL, since a process inside a long graph compilation would not act on SIGTERM; checkpoints are written by rename
    and survive it.

    Args:
        parent: process id of the parent, as the parent knows it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def main(arguments: list[str]) -> int:
    """Run the stage of a job folder; gives the exit code."""
    folder = Path(arguments[0])
    die_with_parent(int(arguments[1]))
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.captureWarnings(True)
    job = StageJob.model_validate_json((folder / JOB).read_text(encoding="utf-8"))
    context = StageContext(report_progress=_progress_writer(folder / PROGRESS), stop_requested=_stop_on_signal(job))
    try:
        result: StageResult = importlib.import_module(f"tasks.{job.stage}").run(job, context)
    except MindtuneError as error:
        _leave_error(folder, error, job)
        return error.exit_code
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        problem = f"{error}".strip().splitlines()
        wrapped = StageError(
            "stage.internal",
            stage=job.stage,
            kind=type(error).__name__,
            problem=problem[0] if problem else "no message",
            log=failed_log(folder),
        )
        _leave_error(folder, wrapped, job)
        return wrapped.exit_code
    write_atomically(folder / RESULT, result.model_dump_json())
    return 0


def _leave_error(folder: Path, error: MindtuneError, job: StageJob) -> None:
    document = {**error.as_document(), "stage": error.stage or job.stage}
    write_atomically(folder / ERROR, json.dumps({"error": document, "exit_code": error.exit_code}))


def _progress_writer(path: Path) -> Callable[[int, int, str], None]:
    def report(done: int, total: int, text: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"done": done, "total": total, "text": text}) + "\n")

    return report


def _stop_on_signal(job: StageJob) -> Callable[[], bool]:
    """On SIGTERM a stage that saves its work is told so; any other just ends."""
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if not STAGES[job.stage].saves_its_work:
            raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks by SIGTERM
    return lambda: asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
