"""Two runs of the same configuration over one store, as processes of their own: one artifact, and both end well.

Here the second run waits for the first and then takes what it made; the case allows it.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.data.shards import TokenRows
from tasks.store import Store

PROJECT = Path(__file__).parents[2]
SUPPORT = PROJECT / "tests" / "support"


@pytest.fixture
def start(tmp_path, stories, case_folder):
    """A function that starts a run of the case's data; its rounds begin when those of the other do."""

    def start(name: str, other: str, rounds: int = 1, data: Path | None = None) -> subprocess.Popen[str]:
        data = data or case_folder(15) / "train.jsonl"
        arguments = [str(tmp_path), name, other, str(stories), str(data), str(rounds)]
        return subprocess.Popen(
            [sys.executable, str(SUPPORT / "racing_runs.py"), *arguments],
            env={"PYTHONPATH": f"{PROJECT}:{SUPPORT}", "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def answers(process: subprocess.Popen[str]) -> list[dict[str, str]]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def only_artifact(root: Path) -> Path:
    """The one complete artifact of the stage; no other folder, and no file of a run that is under way inside it."""
    (folder,) = (root / "tokenize").iterdir()
    ref, problem = Store(root).find("tokenize", folder.name, deep=True)
    assert ref is not None, problem
    listed = {entry.path for entry in Store(root).read_manifest(folder).files}
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == listed | {"manifest.json"}
    return folder


def test_started_together_both_end_well_with_one_artifact(start, case_folder, tmp_path):
    expected = json.loads((case_folder(15) / "expected.json").read_text(encoding="utf-8"))
    rounds = expected["rounds"]
    one, two = start("a", "b", rounds), start("b", "a", rounds)
    for number, (first, second) in enumerate(zip(answers(one), answers(two), strict=True)):
        assert sorted((first["action"], second["action"])) == ["ran", "reused"]
        assert first["digest"] == second["digest"]
        folder = only_artifact(tmp_path / str(number) / "root")
        assert len(TokenRows(folder / "train")) == expected["rows"]
    (tmp_path / "0" / "c.ready").unlink(missing_ok=True)
    third = answers(start("c", "a"))  # the first round's store again
    assert [answer["action"] for answer in third] == ["reused"]


def many_records(path: Path) -> Path:
    """Enough of them that a run can be met inside tokenization."""
    lines = (json.dumps({"instruction": f"No. {k}", "output": f"It is {k}."}) for k in range(20_000))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def wait_for_rows(root: Path, process: subprocess.Popen[str]) -> None:
    """Until a run writes rows."""
    deadline = time.monotonic() + 60
    while not list(root.glob("work/tokenize/*/build/train/part-*.arrow")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it was met inside tokenization"
        time.sleep(0.002)


def test_a_second_run_that_comes_while_the_first_tokenizes_takes_what_it_makes(start, tmp_path):
    data = many_records(tmp_path / "many.jsonl")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "none.ready").touch()
    first = start("a", "none", data=data)
    wait_for_rows(tmp_path / "0" / "root", first)
    second = start("b", "none", data=data)
    assert [answer["action"] for answer in answers(first)] == ["ran"]
    assert [answer["action"] for answer in answers(second)] == ["reused"]
    assert len(TokenRows(only_artifact(tmp_path / "0" / "root") / "train")) == 20_000


def test_when_the_first_is_killed_the_second_finishes(start, tmp_path):
    data = many_records(tmp_path / "many.jsonl")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "none.ready").touch()
    first = start("a", "none", data=data)
    wait_for_rows(tmp_path / "0" / "root", first)
    second = start("b", "none", data=data)
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.communicate(timeout=10)
    assert [answer["action"] for answer in answers(second)] == ["ran"]
    assert not psutil.wait_procs(children, timeout=10)[1], "a process of the killed run goes on"
    assert len(TokenRows(only_artifact(tmp_path / "0" / "root") / "train")) == 20_000
