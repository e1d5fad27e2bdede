"""Every preset: found by walking the folder, described, valid, and planned, or it names what is missing."""

import json
import os
from pathlib import Path

import pytest
import yaml

from flows.run import run_job
from flows.settings import PRESETS, load_config, preset_names
from schemas.errors import HostError, InputError
from tasks.environment import guess_device
from tasks.locations import not_downloaded
from tasks.plan import Planner, check_inputs
from tasks.precision import check_precision
from tasks.stages import STAGES
from tasks.store import Store

FILES = sorted(PRESETS.rglob("*.y*ml"))
MISSING = ("model.folder_missing", "model.package_missing", "data.file_missing")
OF_THE_ARTICLES = ("llama2-7b-alpaca-zh", "qwen2.5-7b")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MINDTUNE_DATA", os.environ.get("MINDTUNE_DATA", str(PRESETS.parents[2] / "shared" / "data")))


def test_every_file_of_the_folder_is_a_preset() -> None:
    assert [path.stem for path in FILES] == preset_names()
    assert {"alpaca-zh", "identity-zh", "stories260k", *OF_THE_ARTICLES} <= set(preset_names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_preset_says_what_it_is(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_preset_names_no_path_of_one_machine(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    train = values["data"]["train"]
    for location in (values["model"]["base"], *([train] if isinstance(train, str) else train)):
        assert not str(location).startswith(("/", "~"))


@pytest.mark.parametrize("name", preset_names())
def test_preset_plans_or_names_what_is_missing(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    check_precision(config.train.precision, guess_device(config.env.device))
    try:
        check_inputs(config)
    except InputError as error:
        if error.code not in MISSING:
            raise
        pytest.skip(f"not here: {error.message}")
    decisions = Planner(Store(tmp_path), config).plan()
    assert [decision.stage for decision in decisions] == list(STAGES)
    assert all(decision.ref is None for decision in decisions)
    if not_downloaded(config.model):
        reasons = [decision.reason for decision in decisions if "base" in STAGES[decision.stage].sources]
        assert any("not downloaded yet" in reason for reason in reasons)


@pytest.mark.parametrize("name", OF_THE_ARTICLES)
def test_presets_of_the_articles_have_their_figures(name: str) -> None:
    config = load_config(name)
    train, evaluate = config.train, config.evaluate
    assert train.lora.model_dump(mode="json") == {
        "rank": 8,
        "alpha": 32.0,
        "dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
    }
    assert (train.epochs, train.batch_size, train.gradient_accumulation) == (3, 4, 4)
    assert (train.learning_rate, train.weight_decay, train.warmup_steps, train.schedule) == (3e-4, 0.01, 100, "linear")
    assert (train.precision, train.recompute) == ("bfloat16", True)
    assert (config.tokenize.max_length, config.export.cache_length) == (512, 2048)
    assert (evaluate.temperature, evaluate.top_p, evaluate.max_new_tokens) == (0.7, 0.9, 200)
    assert config.env.device == "ascend"


@pytest.mark.parametrize("name", OF_THE_ARTICLES)
def test_presets_for_an_npu_are_refused_elsewhere_before_anything_is_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    monkeypatch.setattr("flows.run.download_missing", lambda model: pytest.fail(f"{model.base} was downloaded"))
    monkeypatch.setattr("tasks.environment.device_nodes", lambda *_: ())
    config = load_config(name, [f"artifacts={tmp_path}"])
    with pytest.raises(HostError, match="No usable Ascend NPU"):
        run_job(config, name, name)
    assert not (tmp_path / "runs").exists()


def test_every_placeholder_of_the_identity_rows_is_replaced() -> None:
    config = load_config("identity-zh")
    rows = json.loads(Path(str(config.data.train[0])).read_text(encoding="utf-8"))
    for row in rows:
        answer = row["output"]
        for text, name in config.data.replace.items():
            answer = answer.replace(text, name)
        assert "{" not in answer
