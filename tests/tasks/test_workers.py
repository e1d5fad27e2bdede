import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.errors import HostError, InputError, StageError
from tasks import tokenize, workers
from tasks.workers import AHEAD, in_order, usable_cores

PROJECT = Path(__file__).parents[2]


def squared(number: int) -> tuple[int, int]:
    time.sleep(0.05 if number % 3 == 0 else 0)  # later items are ready before earlier ones
    return number**2, os.getpid()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    found = list(in_order(squared, range(12), count))
    assert [result for result, _ in found] == [number**2 for number in range(12)]
    processes = {process for _, process in found}
    assert (processes == {os.getpid()}) == (count == 1)
    assert len(processes) <= count


def test_items_are_read_only_a_little_ahead_of_the_results() -> None:
    read = []

    def items() -> Any:
        for number in range(40):
            read.append(number)
            yield number

    for seen, _ in enumerate(in_order(squared, items(), 2), 1):
        assert len(read) <= seen + 2 * AHEAD


def failing(number: int) -> int:
    if number in (3, 5):
        raise InputError("data.bad_record", stage="tokenize", place=f"Record {number}", reason="no reason")
    return number


def test_the_first_error_in_order_is_raised_as_it_was() -> None:
    results = in_order(failing, range(100), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match=r"Record 3 can't be used: no reason"):
        next(results)
    assert not psutil.Process().children()


def killed(number: int) -> bytes:
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return bytes(10**6)


@pytest.mark.parametrize("_again", range(5))
def test_a_worker_that_is_killed_is_an_error_and_no_hang(_again: int) -> None:
    with pytest.raises(StageError, match="One of the 2 worker processes of the stage ended") as caught:
        list(in_order(killed, range(1000), 2))
    assert isinstance(caught.value.__cause__, BrokenProcessPool)
    assert not psutil.Process().children()


def test_who_stops_asking_leaves_no_process() -> None:
    results = in_order(squared, range(1000), 2)
    next(results)
    results.close()
    assert not psutil.Process().children()


def test_usable_cores_are_those_that_the_process_may_run_on() -> None:
    assert usable_cores() == len(psutil.Process().cpu_affinity())


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of several batches, with records that can't be used and lines that are none."""

    def record(number: int) -> str:
        if number % 97 == 5:
            return "{" if number % 2 else json.dumps({"instruction": "a", "output": ""})
        return json.dumps({"instruction": f"Who is {{{{name}}}} {number}?", "output": "word " * (number % 61 + 1)})

    made = []
    for place in range(2):
        path = tmp_path / f"{place}.jsonl"
        path.write_text("".join(record(number) + "\n" for number in range(place, 2000 + 700 * place)))
        made.append(path)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_share": 0.2, "rows_per_shard": 700},
        {"packing": "pack", "max_length": 128, "too_long": "split"},
        {"replace": {"{{name}}": "Tom", "nobody": "x"}, "packing": "buckets"},
    ],
)
def test_everything_is_the_same_to_the_byte_for_any_number_of_workers(
    tokenize_files: Callable[..., Any], files: list[Path], settings: dict[str, Any]
) -> None:
    sources = [{"path": str(files[0]), "weight": 1.5}, {"path": str(files[1]), "weight": 0.7}]
    one, two, four = (tokenize_files(*sources, workers=count, **settings) for count in (1, 2, 4))
    assert one.report.rejected > 40
    assert one.report.left_out > 500
    with_name = one.report.read - one.report.rejected
    assert one.report.replaced == ({"{{name}}": with_name, "nobody": 0} if "replace" in settings else {})
    wanted = content(one.folder)
    assert {"train/part-00000.arrow", "rejected.jsonl", "report.json"} <= set(wanted)
    assert content(two.folder) == wanted
    assert content(four.folder) == wanted


def test_a_bad_record_stops_all_workers(tokenize_files: Callable[..., Any], files: list[Path]) -> None:
    with pytest.raises(InputError, match=r"Record 5 \(line 6\) of 0\.jsonl|Line 6 of 0\.jsonl"):
        tokenize_files(*files, workers=2, on_bad="stop")
    assert not psutil.Process().children()


def test_without_the_package_of_dask_the_error_says_how_to_get_it(
    tokenize_files: Callable[..., Any], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(HostError, match="`distributed` is not installed") as caught:
        tokenize_files(*files, dask="tcp://127.0.0.1:8786")
    assert "mindtune[dask]" in caught.value.hint


def test_small_files_need_no_second_process(
    tokenize_files: Callable[..., Any], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(function: Any, items: Any, count: int) -> Any:
        asked.append(count)
        return map(function, items)

    monkeypatch.setattr(tokenize, "usable_cores", lambda: 64)
    monkeypatch.setattr(tokenize, "in_order", lambda *given: (each for each in noted(*given)))
    size = sum(file.stat().st_size for file in files)
    for limit in (size + 1, size // 2, 1):
        monkeypatch.setattr(tokenize, "BYTES_PER_WORKER", limit)
        tokenize_files(*files)
    tokenize_files(*files, workers=5)
    assert asked == [1, 3, workers.MOST_WORKERS, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_stage(tmp_path: Path, stories: Path, number: int) -> None:
    data = tmp_path / "train.jsonl"
    line = json.dumps({"instruction": "Say it.", "output": "word " * 90}) + "\n"
    data.write_text(line * 50_000)
    code = (
        "import sys; from pathlib import Path; from tokenize_runs import TokenizeRuns;"
        "TokenizeRuns(Path(sys.argv[1]), Path(sys.argv[2]))(Path(sys.argv[3]), rows_per_shard=100, workers=2)"
    )
    runner = psutil.Popen(
        [sys.executable, "-c", code, str(tmp_path / "root"), str(stories), str(data)],
        env={"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests' / 'support'}", "PATH": ""},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(processes := runner.children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        assert runner.poll() is None
        time.sleep(0.01)
    while not list((tmp_path / "root").glob("work/tokenize/*/build/train/part-*.arrow")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = runner.children()
    child.send_signal(number)
    _, alive = psutil.wait_procs([runner, *processes], 10)
    assert not alive
