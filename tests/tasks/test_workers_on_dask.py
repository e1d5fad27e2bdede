"""A Dask cluster of two workers on this machine; skipped where the extra mindtune[dask] is not installed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_dask import killed, nothing, other_process, process_of

from schemas.errors import HostError, InputError, StageError
from tasks import tokenize, workers
from tasks.workers import in_order_on_cluster

pytest.importorskip("distributed", reason="the extra mindtune[dask] is not installed")

PROJECT = Path(__file__).parents[2]


def dask(program: str, *arguments: str, path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.dask_{program}", "--no-dashboard", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with two workers, processes of their own that find mindtune and the tests."""
    folder = tmp_path_factory.mktemp("dask")
    file = folder / "scheduler.json"
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    programs = [dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file), path=path)]
    deadline = time.monotonic() + 60
    try:
        while not file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        worker = ("--nworkers", "2", "--nthreads", "1", "--local-directory", str(folder), address)
        programs.append(dask("worker", *worker, path=path))
        wait_for_workers(address, 2)
        yield address
    finally:
        for program in reversed(programs):
            members = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
            program.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(members, 10)
            for member in alive:
                member.kill()
            program.wait()


def wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=60)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("settings", [{"template": "tokenizer", "packing": "pack"}, {"template": "chatml"}])
def test_a_cluster_makes_the_same_bytes_as_this_process(
    tokenize_files: Callable[..., Any], shared_data: Path, cluster: str, settings: dict[str, Any]
) -> None:
    base = shared_data / "models" / "zh-tiny-llama"
    file = {"path": str(shared_data / "instruction" / "alpaca_zh_part00.json"), "weight": 0.3}
    common = {"tokenizer": base, "base": base, "validation_share": 0.1, **settings}
    here = tokenize_files(file, workers=1, **common)
    there = tokenize_files(file, dask=cluster, **common)
    assert here.report.rejected
    assert here.report.train.records > 2000
    assert content(here.folder) == content(there.folder)


def test_both_workers_take_part_and_the_order_is_kept(cluster: str) -> None:
    found = list(in_order_on_cluster(process_of, range(40), cluster, nothing))
    assert [number for number, _ in found] == list(range(40))
    processes = {process for _, process in found}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_a_bad_record_is_the_same_error_as_here(
    tokenize_files: Callable[..., Any], cluster: str, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"instruction": "a", "output": "b"}\n{"instruction": "a", "output": ""}\n')
    with pytest.raises(InputError, match=r"Record 1 \(line 2\) of data\.jsonl can't be used: output is empty"):
        tokenize_files(file, dask=cluster, on_bad="stop")


def test_an_item_that_kills_its_workers_is_an_error(cluster: str) -> None:
    with pytest.raises(StageError, match=r"The Dask cluster tcp://\S+ gave up"):
        list(in_order_on_cluster(killed, range(1), cluster, nothing))
    wait_for_workers(cluster, 2)  # they are started anew


def test_a_worker_with_other_code_or_libraries_is_refused(cluster: str) -> None:
    with pytest.raises(HostError, match=rf"would not make the same rows: process \d+, here {os.getpid()}\."):
        list(in_order_on_cluster(process_of, range(1), cluster, other_process))


def test_what_can_change_a_row_is_compared() -> None:
    found = tokenize._versions()
    assert found["tokenizers"] == version("tokenizers")
    assert {"code", "transformers", "jinja2", "pyarrow"} <= set(found)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(workers, "CONNECT_SECONDS", 1)
    with pytest.raises(HostError, match=f"The Dask scheduler {address} can't be used"):
        list(in_order_on_cluster(process_of, range(1), address, nothing))
