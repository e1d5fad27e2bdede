"""Work on many items in several processes, results in the order of the items, only a few of them in memory.

The processes are forked: they share what this one has loaded. They end with it, also when it is killed.
"""

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from schemas.errors import StageError
from tasks.child import die_with_parent

T = TypeVar("T")
R = TypeVar("R")

MOST_WORKERS = 8  # more would wait for the one process that reads and writes
AHEAD = 2  # items a worker that are handed out before the first result is waited for
COLLECTED_AFTER = 100_000  # new objects in a worker, which makes many and hardly ever a cycle; Python's is 700

_function: Callable[[Any], Any]  # of a worker process


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """What a function makes of each item, in the order of the items.

    Args:
        function: a function of its item alone.
        items: read as results are asked for, AHEAD * workers in front of them.
        workers: processes; 1: this one.

    Raises:
        StageError: a worker process ended (stage.worker_died).
    """
    if workers == 1:
        yield from map(function, items)
        return
    with _processes(function, workers) as executor:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(executor.submit(_work, item))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise StageError("stage.worker_died", workers=workers) from error


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _processes(function: Callable[[Any], Any], workers: int) -> Iterator[Executor]:
    executor = ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_begin, initargs=(function, os.getpid())
    )  # the arguments are inherited, not pickled
    gc.collect()
    gc.freeze()  # what is there now is not walked through again, nor copied for that
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
        gc.unfreeze()


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the stage's own handler would raise in the midst of a queue
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    gc.set_threshold(COLLECTED_AFTER)
    _function = function


def _work(item: Any) -> Any:
    return _function(item)
