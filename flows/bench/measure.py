"""Time and memory of a command, and where the peers and the test data are."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from schemas.config import LlmConfig
from schemas.errors import HostError, StageError
from schemas.manifest import StageName
from tasks.runner import child_environment

PROJECT = Path(__file__).parents[2]
PEERS = PROJECT / ".venv-peers" / "bin" / "python"
POLL_SECONDS = 0.2
TAIL_LINES = 15


@dataclass(frozen=True)
class Measured:
    """What a command cost.

    Args:
        seconds: wall time of the whole process.
        cpu_seconds: time on the processors, of the process and all below it.
        peak_memory_bytes: largest sum of the proportional set sizes (PSS) of the process and all below it.
        output: what it wrote to standard output.
    """

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    output: str

    def document(self) -> dict[str, float | int]:
        """As plain values."""
        return {
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def measure(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end.

    Args:
        command: program and arguments.
        log: file for its standard error.
        environment: variables to set besides those of this process.

    Raises:
        StageError: bench.failed, it ended with an error.
    """
    out = log.with_suffix(".out")
    started, used = time.monotonic(), _cpu_seconds()
    with log.open("wb") as errors, out.open("wb") as output:
        process = psutil.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            env={**child_environment(), **(environment or {})},
        )  # fmt: skip
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, _tree_memory(process))
                time.sleep(POLL_SECONDS)
            seconds = time.monotonic() - started
        finally:
            if process.poll() is None:
                for member in [*process.children(recursive=True), process]:
                    member.kill()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        raise StageError("bench.failed", command=" ".join(command), status=process.returncode, tail=tail)
    return Measured(seconds, _cpu_seconds() - used, peak, out.read_text(encoding="utf-8"))


def run_stages(config: LlmConfig, folder: Path, stages: Sequence[StageName]) -> tuple[Measured, list[Path]]:
    """The first stages of a job, measured as one process; and the folder of each one's artifact.

    Raises:
        StageError: bench.failed.
    """
    file = folder / "config.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "flows.bench.stages", str(file), str(folder / "root"), *stages]
    measured = measure(command, folder / "mindtune.log")
    return measured, [Path(line) for line in measured.output.splitlines()]


def peer_command(script: str, **arguments: object) -> list[str]:
    """The command of a peer's script, its arguments as one JSON document.

    Raises:
        HostError: there is no `.venv-peers` (bench.no_peers).
    """
    if not PEERS.is_file():
        raise HostError("bench.no_peers", path=PEERS.parents[1])
    return [str(PEERS), str(Path(__file__).parent / "peers" / script), json.dumps(arguments, default=str)]


def data_folder() -> Path:
    """The test data folder, MINDTUNE_DATA.

    Raises:
        HostError: it is not there (bench.no_data).
    """
    folder = Path(os.environ.get("MINDTUNE_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        raise HostError("bench.no_data", path=folder)
    return folder


def _cpu_seconds() -> float:
    """Of all processes below this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree_memory(process: psutil.Process) -> int:
    total = 0
    try:
        members = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return total
