import os
import shutil
from pathlib import Path

import pytest

from schemas.config import LlmConfig
from tasks import fingerprint
from tasks.data.sources import DataFile
from tasks.fingerprint import FileDigests, source_digest


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "memory.json")


def _config(base: Path, *train: Path) -> LlmConfig:
    return LlmConfig.model_validate({"model": {"base": str(base)}, "data": {"train": [str(path) for path in train]}})


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path, digests, monkeypatch):
    reads = []
    real = fingerprint.sha256_file
    monkeypatch.setattr(fingerprint, "sha256_file", lambda path: reads.append(path) or real(path))
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", 0.0)
    path = tmp_path / "x"
    path.write_text("one")
    first = digests.of_file(path)
    assert digests.of_file(path) == first
    digests.save()
    assert FileDigests(tmp_path / "memory.json").of_file(path) == first
    assert len(reads) == 1
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests.of_file(path) != first
    assert len(reads) == 2


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path, digests, monkeypatch):
    reads = []
    real = fingerprint.sha256_file
    monkeypatch.setattr(fingerprint, "sha256_file", lambda path: reads.append(path) or real(path))
    path = tmp_path / "x"
    path.write_text("one")
    digests.of_file(path)
    digests.of_file(path)
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}'])
def test_a_torn_memory_costs_time_only(tmp_path, content):
    (tmp_path / "memory.json").write_text(content)
    (tmp_path / "x").write_text("one")
    assert FileDigests(tmp_path / "memory.json").of_file(tmp_path / "x") == fingerprint.sha256_file(tmp_path / "x")


def test_data_counts_by_content_not_by_path_or_time(tmp_path, digests):
    for name in ("a.json", "sub/b.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('[{"instruction": "a"}]')
    os.utime(tmp_path / "a.json", (1, 1))
    one, other = (
        source_digest("data", _config(tmp_path, tmp_path / name), digests) for name in ("a.json", "sub/b.json")
    )
    assert one == other


@pytest.mark.parametrize("change", ["changed", "added", "removed", "renamed"])
def test_every_change_in_a_data_folder_counts(tmp_path, digests, change):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.json", "b.json"):
        (folder / name).write_text(f'[{{"instruction": "{name}"}}]')
    config = _config(tmp_path, folder)
    before = source_digest("data", config, digests)
    match change:
        case "changed":
            (folder / "a.json").write_text('[{"instruction": "x.json"}]')
        case "added":
            (folder / "c.json").write_text("[{}]")
        case "removed":
            (folder / "b.json").unlink()
        case "renamed":
            (folder / "b.json").rename(folder / "c.json")
    assert source_digest("data", config, digests) != before


def test_the_order_of_data_files_and_their_role_count(tmp_path, digests):
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text("[2]")
    one = source_digest("data", _config(tmp_path, tmp_path / "a.json", tmp_path / "b.json"), digests)
    other = source_digest("data", _config(tmp_path, tmp_path / "b.json", tmp_path / "a.json"), digests)
    assert one != other


def test_weights_and_tokenizer_count_apart(tmp_path, digests, stories):
    base = tmp_path / "base"
    shutil.copytree(stories, base)
    config = _config(base, base)
    before = {name: source_digest(name, config, digests) for name in ("base", "tokenizer")}
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after = {name: source_digest(name, config, digests) for name in ("base", "tokenizer")}
    assert after["base"] != before["base"]
    assert after["tokenizer"] == before["tokenizer"]
    text = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(text + "\n")
    assert source_digest("tokenizer", config, digests) != before["tokenizer"]


def test_a_gguf_file_counts_whole_as_base_and_as_tokenizer(tmp_path, digests):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF one")
    first = {name: source_digest(name, _config(path, tmp_path), digests) for name in ("base", "tokenizer")}
    assert first == dict.fromkeys(first, fingerprint.sha256_file(path))
    shutil.copy(path, tmp_path / "copy.gguf")
    assert {name: source_digest(name, _config(tmp_path / "copy.gguf", tmp_path), digests) for name in first} == first
    path.write_bytes(b"GGUF two")
    assert source_digest("base", _config(path, tmp_path), digests) != first["base"]


def _data_digest(base: Path, digests: FileDigests, **data: object) -> str:
    config = LlmConfig.model_validate({"model": {"base": str(base)}, "data": data})
    return source_digest("data", config, digests)


def test_a_file_counts_by_its_content_and_by_what_its_name_says_of_it(tmp_path, digests, stories):
    for name in ("a.json", "b.json", "c.csv", "d.csv.gz", "e.txt"):
        (tmp_path / name).write_text("{}")
    made = {path.name: _data_digest(stories, digests, train=[str(path)]) for path in sorted(tmp_path.glob("?.*"))}
    assert made["a.json"] == made["b.json"]
    assert made["c.csv"] == made["d.csv.gz"]
    assert len(set(made.values())) == 3


def test_settings_of_a_source_count(tmp_path, digests, stories):
    path = tmp_path / "a.json"
    path.write_text("{}")
    sources = [
        {},
        {"weight": 2},
        {"format": "text"},
        {"columns": {"text": "x"}},
    ]
    made = {_data_digest(stories, digests, train=[{"path": str(path), **own}]) for own in sources}
    assert len(made) == len(sources)


def test_a_glob_counts_by_names_and_contents(tmp_path, digests, stories):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    before = _data_digest(stories, digests, train=[f"{tmp_path}/*.json"])
    (tmp_path / "b.json").rename(tmp_path / "c.json")
    assert _data_digest(stories, digests, train=[f"{tmp_path}/*.json"]) != before


def test_a_remote_file_is_read_once_and_again_when_it_changes(tmp_path, digests, stories, monkeypatch):
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", 0.0)
    reads = []
    opened = DataFile.open
    monkeypatch.setattr(DataFile, "open", lambda file: reads.append(file.path) or opened(file))
    path = tmp_path / "a.json"
    path.write_text("{}")
    uri = path.as_uri()
    first = _data_digest(stories, digests, train=[uri])
    assert first == _data_digest(stories, digests, train=[str(path)])  # the place does not count
    digests.save()
    again = FileDigests(tmp_path / "memory.json")
    assert _data_digest(stories, again, train=[uri]) == first
    assert reads == [uri]
    path.write_text("[]")
    assert _data_digest(stories, again, train=[uri]) != first
    assert reads == [uri, uri]
