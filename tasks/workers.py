"""Work on many items in several processes, results in the order of the items, only a few of them in memory.

Processes of this machine are forked: they share what this one has loaded, and end with it, also when it is killed.
Instead of them a Dask cluster can do the work, on any number of machines with the same code and libraries.
"""

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from schemas.errors import HostError, StageError
from tasks.child import die_with_parent

T = TypeVar("T")
R = TypeVar("R")

MOST_WORKERS = 8  # by default; more would wait for the one process that reads and writes
AHEAD = 2  # items a worker that are handed out before the first result is waited for
COLLECTED_AFTER = 100_000  # new objects; records are many, and hardly ever a cycle. Python's is 700
CONNECT_SECONDS = 20

_function: Callable[[Any], Any]  # of a worker process


class Pending(Protocol):
    """A result that is being worked on."""

    def result(self) -> Any:
        """Wait for it; raises what the function raised."""


Submit = Callable[[Any], Pending]


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R]:
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
    with _processes(function, workers) as submit:
        try:
            yield from _results(submit, items, AHEAD * workers)
        except BrokenProcessPool as error:
            raise StageError("stage.worker_died", workers=workers) from error


def in_order_on_cluster(
    function: Callable[[T], R], items: Iterable[T], address: str, versions: Callable[[], Mapping[str, str]]
) -> Generator[R]:
    """As `in_order`, on the workers of a Dask cluster.

    Args:
        function: a function of its item alone; pickled once for each worker.
        items: as in `in_order`.
        address: of the scheduler.
        versions: what has to be the same on all workers and here.

    Raises:
        HostError: Dask is not installed (dask.missing), there is no scheduler with a worker (dask.unreachable), or a
            worker differs (dask.differs).
        StageError: workers were lost too often (dask.failed).
    """
    try:
        import distributed
        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise HostError("dask.missing") from error
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise HostError("dask.unreachable", address=address, problem=str(error)) from error
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise HostError("dask.unreachable", address=address, problem="it has no workers")
        _check_same(client, versions)
        there = client.scatter(function, broadcast=True)
        try:
            yield from _results(lambda item: client.submit(_apply, there, item, pure=False), items, AHEAD * threads)
        except (KilledWorker, distributed.CancelledError, CommClosedError) as error:
            raise StageError("dask.failed", address=address, problem=str(error)) from error


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _results(submit: Submit, items: Iterable[Any], ahead: int) -> Iterator[Any]:
    waiting: deque[Pending] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _processes(function: Callable[[Any], Any], workers: int) -> Iterator[Submit]:
    executor = ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_begin, initargs=(function, os.getpid())
    )  # the arguments are inherited, not pickled
    gc.collect()
    gc.freeze()  # what is there now is not walked through again, nor copied for that
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER)
    try:
        yield lambda item: executor.submit(_work, item)
    finally:
        executor.shutdown(cancel_futures=True)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the stage's own handler would raise in the midst of a queue
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _function = function


def _work(item: Any) -> Any:
    return _function(item)


def _apply(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _check_same(client: Any, versions: Callable[[], Mapping[str, str]]) -> None:
    wanted = versions()
    for worker, found in client.run(versions, on_error="return").items():
        if isinstance(found, Exception):
            raise HostError("dask.differs", worker=worker, problem=f"{type(found).__name__}: {found}") from found
        different = [f"{name} {found[name]}, here {here}" for name, here in wanted.items() if found[name] != here]
        if different:
            raise HostError("dask.differs", worker=worker, problem="; ".join(different))
