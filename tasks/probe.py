"""A small product on a device, in a process of its own: `python -m tasks.probe DEVICE FILE PARENT_PID`.

A broken driver can hang the process that touches it, or kill it; here that is a reason, not the end of the stage.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.child import die_with_parent
from tasks.files import write_atomically

Device = Literal["CPU", "Ascend"]

TIMEOUT_SECONDS = 300.0  # starting the Ascend runtime takes up to a minute; the rest is for slow disks
SIZE = 64
# The factors are whole numbers up to 8, so every partial sum is below 64 * 8 * 8 = 4096. float32, and the narrower
# formats that matrix units read their operands in, hold all of these exactly: any order of summation is exact.
LIMIT = 0.0

PROGRAM = (sys.executable, "-m", "tasks.probe")


class ProbeError(Exception):
    """The product could not be computed at all; the text says why."""


@dataclass(frozen=True)
class Probe:
    """What the product on the device gave.

    Args:
        difference: largest difference from NumPy's product.
        seconds: time from the choice of the device to the result, imports left out.
    """

    difference: float
    seconds: float


def probe(device: Device, program: Sequence[str] = PROGRAM, timeout_seconds: float = TIMEOUT_SECONDS) -> Probe:
    """Compute a small product on a device, in a child process.

    Args:
        device: CPU or Ascend.
        program: command that takes device, result file and parent's process id.
        timeout_seconds: after this time the process is killed.

    Raises:
        ProbeError: MindSpore reported an error, or the process crashed or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="mindtune-probe-") as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output.txt"
        with output.open("wb") as file:
            try:
                # in the folder, since MindSpore writes kernel_meta where it runs; a file instead of a pipe, since its
                # compiler processes would hold a pipe open
                ended = subprocess.run(
                    [*program, device, str(answer), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    timeout=timeout_seconds,
                )
            except subprocess.TimeoutExpired as error:
                raise ProbeError(f"it did not end within {timeout_seconds:g} s") from error
        document = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else {}
        if "error" in document:
            raise ProbeError(document["error"])
        if not document:
            raise ProbeError(_how_it_ended(ended.returncode, output.read_text(encoding="utf-8", errors="replace")))
        return Probe(**document)


def _how_it_ended(code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    return f"{how}; last line: {lines[-1][:300]}" if lines else how


def multiply(device: Device) -> Probe:
    """The product itself, in this process."""
    import mindspore
    import numpy

    from tasks.models.device import use_device

    random = numpy.random.Generator(numpy.random.Philox(0))
    left, right = (random.integers(-8, 9, (SIZE, SIZE)).astype(numpy.float32) for _ in range(2))
    started = time.perf_counter()
    use_device(device)
    product = mindspore.ops.matmul(mindspore.Tensor(left), mindspore.Tensor(right)).asnumpy()
    seconds = time.perf_counter() - started
    return Probe(float(numpy.abs(product - left @ right).max()), seconds)


def main(device: Device, answer: Path, parent: int) -> None:
    """Leave the outcome, or the first lines of MindSpore's error, in a file."""
    die_with_parent(parent)
    try:
        outcome = multiply(device)
        document: dict[str, float | str] = {"difference": outcome.difference, "seconds": outcome.seconds}
    except Exception as error:  # whatever MindSpore and its plugins raise is the reason that the user gets to see
        text = " ".join(word for word in str(error).split() if word.strip("-"))
        document = {"error": f"{type(error).__name__}: {text[:500]}"}
    write_atomically(answer, json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))  # type: ignore[arg-type]
    # not sys.exit: see tasks/child.py
    os._exit(0)
