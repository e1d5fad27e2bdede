"""A child process like `tasks.child` in which every stage is a fake: it does what the first data file's name says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from schemas.errors import InputError
from schemas.manifest import StageJob, StageResult
from schemas.reports import EnvReport
from tasks import child
from tasks.stages import STAGES, StageContext

ENV = EnvReport(
    python="3.11",
    platform="p",
    machine="m",
    cores=1,
    total_memory_bytes=1,
    packages=(),
    device="CPU",
    device_reason="fake",
    probe_error=0.0,
    probe_seconds=0.0,
)


def run(job: StageJob, context: StageContext) -> StageResult:
    output = Path(job.output)
    sys.stdout.write("first line\n")
    context.report_progress(1, 2, "half")
    (output / "data.txt").write_text(f"{job.key} from {sorted(job.inputs)}")
    (output / "times.txt").write_text(str(time.time()))
    if job.stage == "validate_env":
        (output / "report.json").write_text(ENV.model_dump_json())
    match Path(job.config.data.train[0]).stem:
        case "error":
            raise InputError("data.file_missing", path="/gone")
        case "bug":
            raise ZeroDivisionError("one / zero")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            helper = subprocess.Popen(["sleep", "600"])
            (Path(job.work) / "pids").write_text(f"{os.getpid()} {helper.pid}")
            time.sleep(600)
        case "slow":
            (Path(job.work) / "pids").write_text(f"{os.getpid()}")
            while not context.stop_requested():
                time.sleep(0.05)
    context.report_progress(2, 2, "whole")
    return StageResult(metrics={"rows": 3}, volatile=("times.txt",))


if __name__ == "__main__":
    for stage in STAGES:
        fake = ModuleType(f"tasks.{stage}")
        fake.run = run
        sys.modules[f"tasks.{stage}"] = fake
    sys.exit(child.main(sys.argv[1:]))
