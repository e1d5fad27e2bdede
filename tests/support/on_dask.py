"""Functions that the tests of the fan-out to Dask send to its workers, which import this module."""

import os
import signal
import time


def process_of(number: int) -> tuple[int, int]:
    """The item and who worked on it; later items are ready before earlier ones."""
    time.sleep(0.05 if number % 3 == 0 else 0)
    return number, os.getpid()


def killed(_number: int) -> None:
    """End the worker."""
    os.kill(os.getpid(), signal.SIGKILL)


def nothing() -> dict[str, str]:
    """No versions to compare."""
    return {}


def other_process() -> dict[str, str]:
    """Versions that differ everywhere."""
    return {"code": "same", "process": str(os.getpid())}
