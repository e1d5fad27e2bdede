import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemas.config import LlmConfig
from schemas.errors import InputError, StoreError
from schemas.manifest import ArtifactRef, StageOutcome, StageResult
from tasks.files import digest_of
from tasks.store import Store

PROJECT = Path(__file__).parents[2]
CONFIG = LlmConfig.model_validate({"model": {"base": "b"}, "data": {"train": ["t"]}})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


def make(store: Store, document: dict, files: dict[str, str], result: StageResult = StageResult()) -> ArtifactRef:  # noqa: B008
    key = digest_of(document)
    with store.lock("tokenize", key):
        work = store.prepare_work("tokenize", key)
        for name, text in files.items():
            path = work / "build" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return store.publish("tokenize", document, result, {}, "run", 1.0)


def test_a_published_artifact_is_found_whole_with_its_files(store):
    ref = make(store, {"a": 1}, {"part/x.arrow": "data", "report.json": "{}"})
    found, _ = store.find("tokenize", digest_of({"a": 1}), deep=True)
    assert found == ref
    assert (store.open(ref) / "part" / "x.arrow").read_text() == "data"


def test_the_digest_is_over_the_payload_alone(store, tmp_path):
    one = make(store, {"a": 1}, {"x": "data", "log": "10 s"}, StageResult(volatile=("log",)))
    other = make(Store(tmp_path / "other"), {"a": 1}, {"x": "data", "log": "12 s"}, StageResult(volatile=("log",)))
    third = make(store, {"a": 2}, {"x": "other", "log": "10 s"}, StageResult(volatile=("log",)))
    assert one.digest == other.digest != third.digest


def test_a_folder_without_a_manifest_is_no_artifact(store):
    folder = store.folder("tokenize", digest_of({"a": 1}))
    folder.mkdir(parents=True)
    (folder / "x").write_text("data")
    ref, why = store.find("tokenize", digest_of({"a": 1}))
    assert ref is None
    assert "no readable manifest.json" in why


@pytest.mark.parametrize("damage", ["shorter", "missing", "flipped", "extra", "manifest"])
def test_a_damaged_artifact_is_never_reused_and_is_set_aside_when_made_again(store, damage):
    ref = make(store, {"a": 1}, {"x": "data", "y": "more"})
    folder = store.root / ref.location
    match damage:
        case "shorter":
            (folder / "x").write_text("dat")
        case "missing":
            (folder / "x").unlink()
        case "flipped":
            (folder / "x").write_text("dat!")
        case "extra":
            (folder / "z").write_text("stray")
        case "manifest":
            (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-20])
    fresh = Store(store.root)
    found, why = fresh.find("tokenize", ref.key, deep=True)
    assert found is None
    assert "damaged" in why
    with pytest.raises(StoreError, match=r"damaged|no artifact"):
        fresh.open(ref)
    again = make(fresh, {"a": 1}, {"x": "data", "y": "more"})
    assert again == ref
    assert Store(store.root).find("tokenize", ref.key, deep=True)[0] == ref
    (reason,) = (store.root / "aside" / "damaged").glob("*.reason.txt")
    assert "damaged" in reason.read_text()


def test_made_again_with_the_same_digest_the_earlier_artifact_stays(store):
    ref = make(store, {"a": 1}, {"x": "data"})
    inode = (store.root / ref.location / "x").stat().st_ino
    assert make(store, {"a": 1}, {"x": "data"}) == ref
    assert (store.root / ref.location / "x").stat().st_ino == inode


def test_made_again_with_another_digest_both_can_be_opened(store):
    first = make(store, {"a": 1}, {"x": "one"})
    second = make(store, {"a": 1}, {"x": "two"})
    third = make(store, {"a": 1}, {"x": "one"})
    assert first.key == second.key
    assert first == third
    assert (store.open(first) / "x").read_text() == "one"
    assert (store.open(second) / "x").read_text() == "two"


def test_a_manifest_of_an_unknown_version_says_so(store):
    ref = make(store, {"a": 1}, {"x": "data"})
    path = store.root / ref.location / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99, "news": 1}))
    with pytest.raises(StoreError, match="format version 99"):
        store.read_manifest(path.parent)


def test_no_temporary_file_is_left_in_an_artifact_or_beside_it(store):
    ref = make(store, {"a": 1}, {"x": "data"})
    assert sorted(path.name for path in (store.root / ref.location).iterdir()) == ["manifest.json", "x"]
    assert not store.work_folder("tokenize", ref.key).exists()


def test_a_full_disk_while_publishing_leaves_nothing(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.store.sync_tree", full)
    with pytest.raises(OSError, match="No space left"):
        make(store, {"a": 1}, {"x": "data"})
    assert store.find("tokenize", digest_of({"a": 1}))[0] is None
    monkeypatch.undo()
    assert make(store, {"a": 1}, {"x": "data"})


def test_a_root_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"root .*file.* can't be written"):
        make(Store(tmp_path / "file"), {"a": 1}, {"x": "data"})


def test_one_writer_per_key_and_a_killed_one_frees_it(store):
    code = (
        "import sys, time; from pathlib import Path; from tasks.store import Store\n"
        "with Store(Path(sys.argv[1])).lock('tokenize', 'k'):\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(store.root)], stdout=subprocess.PIPE, cwd=PROJECT)
    assert holder.stdout.readline() == b"held\n"
    with store.lock("tokenize", "other key"):
        pass
    holder.kill()  # SIGKILL: no clean-up of its own
    holder.communicate()
    started = time.monotonic()
    with store.lock("tokenize", "k"):
        assert time.monotonic() - started < 10


def _outcome(stage, digest, inputs=None):
    return StageOutcome(stage=stage, action="ran", reason="r", key="k", digest=digest, inputs=inputs or {})


def test_downstream_of_a_stage_made_again_is_stale(store):
    run = store.new_run(CONFIG, "preset", "label").run
    for outcome in (
        _outcome("tokenize", "t1"),
        _outcome("train", "a1", {"tokenize": "t1"}),
        _outcome("merge", "m1", {"train": "a1"}),
        _outcome("export", "e1", {"merge": "m1"}),
        _outcome("evaluate", "v1", {"tokenize": "t1", "export": "e1"}),
    ):
        store.record_outcome(run, outcome)
    assert store.read_run(run).stale_stages() == {}
    record = store.record_outcome(run, _outcome("train", "a2", {"tokenize": "t1"}))
    assert list(record.stale_stages()) == ["merge", "export", "evaluate"]
    assert [old.digest for old in record.history] == ["a1"]
    store.record_outcome(run, _outcome("merge", "m2", {"train": "a2"}))
    assert list(store.read_run(run).stale_stages()) == ["export", "evaluate"]


def test_latest_is_the_run_that_was_started_last(store):
    first = store.new_run(CONFIG, "s", "zzz").run
    time.sleep(1.1)  # names count seconds
    second = store.new_run(CONFIG, "s", "aaa").run
    assert store.read_run("latest").run == second != first


@pytest.mark.parametrize("name", ["missing", "../secret", "", "a/b"])
def test_an_unknown_run_is_an_error_that_lists_the_known(store, name):
    known = store.new_run(CONFIG, "s", "label").run
    with pytest.raises(InputError, match=known):
        store.read_run(name)


def test_a_run_name_cannot_leave_the_root(store):
    run = store.new_run(CONFIG, "s", "../../x y/ü").run
    assert os.sep not in run
    assert (store.root / "runs" / f"{run}.json").is_file()


def test_a_setting_counts_after_its_stage_too_also_where_the_payload_is_the_same(store):
    first = make(store, {"config": {"max_length": 8}, "code": "a"}, {"x": "rows"})
    other_setting = make(store, {"config": {"max_length": 9}, "code": "a"}, {"x": "rows"})
    other_code = make(store, {"config": {"max_length": 8}, "code": "b"}, {"x": "rows"})
    assert first.digest != other_setting.digest
    assert first.digest == other_code.digest


def test_a_failed_rerun_leaves_the_run_the_artifact_that_it_had(store):
    run = store.new_run(CONFIG, "s", "label").run
    store.record_outcome(run, _outcome("train", "a1"))
    failed = StageOutcome(stage="train", action="failed", reason="no space", key="k2")
    record = store.record_outcome(run, failed)
    outcome = record.outcome("train")
    assert (outcome.action, outcome.reason, outcome.digest) == ("failed", "no space", "a1")
    assert record.stale_stages() == {}


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format_version": 2}', b"\xff\xfe"])
def test_an_unreadable_run_record_does_not_hide_the_others(store, content):
    run = store.new_run(CONFIG, "s", "label").run
    (store.root / "runs" / "99990101-000000-bad.json").write_bytes(content)
    assert store.read_run("latest").run == run
    with pytest.raises(StoreError, match=r"can't be read|format version"):
        store.read_run("99990101-000000-bad")


def test_a_run_whose_process_was_killed_is_interrupted(store):
    run = store.new_run(CONFIG, "s", "label").run
    with store.alive(run):
        assert store.read_run(run).status == "running"
        store.record_outcome(run, _outcome("tokenize", "t1"))
        assert Store(store.root).read_run(run).status == "running"
    assert store.read_run(run).status == "interrupted"
    store.finish_run(run, CONFIG)
    assert store.read_run(run).status == "done"


def test_a_dangling_link_in_the_place_of_an_artifact_is_set_aside(store):
    key = digest_of({"a": 1})
    store.folder("tokenize", key).parent.mkdir(parents=True)
    store.folder("tokenize", key).symlink_to("/nowhere")
    assert store.find("tokenize", key)[0] is None
    ref = make(store, {"a": 1}, {"x": "data"})
    assert (store.open(ref) / "x").read_text() == "data"


def test_an_artifact_under_another_key_is_damaged(store):
    ref = make(store, {"a": 1}, {"x": "data"})
    shutil.copytree(store.folder("tokenize", ref.key), store.folder("tokenize", "0" * 64))
    assert "it belongs to tokenize" in store.find("tokenize", "0" * 64)[1]


def test_a_hidden_file_of_a_file_browser_does_no_harm(store):
    ref = make(store, {"a": 1}, {"x": "data"})
    (store.open(ref) / ".DS_Store").write_text("")
    assert Store(store.root).find("tokenize", ref.key, deep=True)[0] == ref
