import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from schemas.config import LlmConfig
from schemas.errors import InputError, MindtuneError, StageError
from schemas.manifest import RunSpec, StageJob
from tasks import runner
from tasks.runner import run_child
from tasks.store import Store

FAKE_CHILD = Path(__file__).parents[1] / "support" / "fake_child.py"
PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fake_child(monkeypatch):
    monkeypatch.setattr(runner, "CHILD", (str(FAKE_CHILD),))


def _job(tmp_path: Path, behaviour: str) -> tuple[StageJob, Path]:
    work = tmp_path / "work" / "tokenize" / ("k" * 64)
    for name in ("build", "keep"):
        (work / name).mkdir(parents=True)
    config = LlmConfig.model_validate({"model": {"base": "b"}, "data": {"train": [behaviour]}})
    job = StageJob(
        stage="tokenize",
        key="k" * 64,
        run="r",
        config=config,
        inputs={},
        sources={},
        output=str(work / "build"),
        work=str(work / "keep"),
        device="CPU",
    )
    return job, work


def _run(tmp_path: Path, behaviour: str):
    job, work = _job(tmp_path, behaviour)
    lines, progress = [], []
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        result = run_child(job, work, lock, lines.append, lambda *args: progress.append(args))
    finally:
        os.close(lock)
    return result, lines, progress


def _wait_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    alive = pids
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        time.sleep(0.05)
    return alive


def _wait_for(path: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def test_result_log_lines_and_progress_come_back(tmp_path):
    result, lines, progress = _run(tmp_path, "fine")
    assert result.metrics == {"rows": 3}
    assert "first line" in lines
    assert progress[-1] == (2, 2, "whole")


def test_an_error_of_the_stage_keeps_code_words_and_exit_code(tmp_path):
    with pytest.raises(MindtuneError, match=r"data file /gone does not exist") as caught:
        _run(tmp_path, "error")
    wanted = InputError("data.file_missing", path="/gone")
    assert (caught.value.code, caught.value.exit_code, caught.value.hint) == (wanted.code, 2, wanted.hint)
    assert caught.value.stage == "tokenize"


def test_an_unexpected_exception_names_its_kind_and_the_log(tmp_path):
    with pytest.raises(MindtuneError, match="ZeroDivisionError: one / zero") as caught:
        _run(tmp_path, "bug")
    log = Path(caught.value.hint.rsplit(" ", 1)[-1])
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(("behaviour", "name"), [("killed", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_a_crash_is_an_error_with_signal_and_last_lines(tmp_path, behaviour, name):
    with pytest.raises(StageError, match=f"(?s){name}.*first line"):
        _run(tmp_path, behaviour)


def test_when_the_runner_is_interrupted_the_stage_and_its_helpers_end(tmp_path, monkeypatch):
    job, work = _job(tmp_path, "hang")

    def interrupt():
        _wait_for(work / "keep" / "pids")
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    # mindspore 2.7.0, once it ran a graph in this process, ends it with SIGTERM on SIGINT
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_child(job, work, lock, lambda _: None, lambda *_: None)
    finally:
        signal.signal(signal.SIGINT, handler or signal.default_int_handler)
        os.close(lock)
    timer.join()
    assert _wait_gone(_wait_for(work / "keep" / "pids")) == []


def test_when_the_parent_is_killed_the_child_ends_and_the_lock_is_free(tmp_path):
    job, work = _job(tmp_path, "slow")
    (tmp_path / "job.json").write_text(job.model_dump_json())
    code = (
        "import sys; from pathlib import Path; from schemas.manifest import StageJob; from tasks import runner;"
        "from tasks.store import Store; runner.CHILD = (sys.argv[3],);"
        "job = StageJob.model_validate_json(Path(sys.argv[1]).read_text());\n"
        "with Store(Path(sys.argv[2]).parents[2]).lock('tokenize', job.key) as lock:\n"
        "    runner.run_child(job, Path(sys.argv[2]), lock, print, print)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "job.json"), str(work), str(FAKE_CHILD)]
    parent = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(PROJECT)}, stdout=subprocess.DEVNULL)
    pids = _wait_for(work / "keep" / "pids")
    parent.kill()
    parent.wait()
    assert _wait_gone(pids) == []
    with Store(tmp_path).lock("tokenize", job.key):
        pass


def test_two_runs_of_one_key_make_it_once(tmp_path, monkeypatch):
    data = tmp_path / "fine"
    data.write_text('{"instruction": "a", "output": "b"}\n')
    monkeypatch.setattr("tasks.plan.source_digest", lambda name, *_: name)
    config = LlmConfig.model_validate({"model": {"base": "b"}, "data": {"train": ["fine"]}})
    store = Store(tmp_path / "root")
    actions = []

    def one():
        run = store.new_run(config, "s", "label").run
        stage = runner.StageRun("tokenize", RunSpec(run=run, config=config, root=str(store.root)), {})
        stage.make(lambda _: None, lambda *_: None)
        actions.append(store.read_run(run).outcome("tokenize").action)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(actions) == ["ran", "reused"]
    assert len(list((store.root / "tokenize").iterdir())) == 1
