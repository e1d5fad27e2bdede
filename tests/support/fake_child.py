"""A child process like `tasks.child` whose stage `tokenize` does what the job's template folder name says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from schemas.errors import InputError
from schemas.manifest import StageResult
from tasks import child


def run(job, context):
    behaviour = job.config.data.train[0]
    output = Path(job.output)
    sys.stdout.write("first line\n")
    context.report_progress(1, 2, "half")
    match behaviour:
        case "fine":
            (output / "data.txt").write_text("made")
            (output / "log-like.txt").write_text(str(time.time()))
        case "error":
            raise InputError("data.file_missing", path="/gone")
        case "bug":
            raise ZeroDivisionError("one / zero")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            sys.stdout.write("last words\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            helper = subprocess.Popen(["sleep", "600"])
            (Path(job.work) / "pids").write_text(f"{os.getpid()} {helper.pid}")
            time.sleep(600)
        case "slow":
            (output / "data.txt").write_text("half")
            (Path(job.work) / "pids").write_text(f"{os.getpid()}")
            while not context.stop_requested():
                time.sleep(0.05)
    context.report_progress(2, 2, "whole")
    return StageResult(metrics={"rows": 3}, volatile=("log-like.txt",))


if __name__ == "__main__":
    fake = ModuleType("tasks.tokenize")
    fake.run = run
    sys.modules["tasks.tokenize"] = fake
    child._exit(child.main(sys.argv[1:]))
