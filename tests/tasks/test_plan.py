import shutil
from pathlib import Path
from typing import Any

import pytest
from filled_store import fill, to_run

from schemas.config import LlmConfig
from schemas.errors import ConfigError, InputError
from schemas.manifest import StageName
from tasks.code import code_digests
from tasks.plan import Planner, check_inputs, differences, explain
from tasks.stages import STAGES
from tasks.store import Store

QUESTION = '{"instruction": "a", "output": "b"}\n'


@pytest.fixture
def config(tmp_path: Path, stories: Path) -> LlmConfig:
    (tmp_path / "train.jsonl").write_text(QUESTION)
    return LlmConfig.model_validate(
        {"model": {"base": str(stories)}, "data": {"train": [str(tmp_path / "train.jsonl")]}}
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


def changed(config: LlmConfig, section: str, **values: Any) -> LlmConfig:
    document = config.model_dump()
    document[section].update(values)
    return LlmConfig.model_validate(document)


def test_all_runs_in_an_empty_store_and_nothing_in_a_full_one(store, config):
    assert to_run(store, config) == list(STAGES)
    fill(store, config)
    assert to_run(store, config) == []


@pytest.mark.parametrize(
    ("section", "values", "first"),
    [
        ("tokenize", {"max_length": 64}, "tokenize"),
        ("tokenize", {"template": "plain"}, "tokenize"),
        ("data", {"validation_share": 0.3}, "tokenize"),
        ("train", {"learning_rate": 1e-3}, "train"),
        ("train", {"seed": 1}, "train"),
        ("merge", {"dtype": "float16"}, "merge"),
        ("export", {"cache_length": 256}, "export"),
        ("evaluate", {"temperature": 0.5}, "evaluate"),
        ("evaluate", {"prompts": ["Who?"]}, "evaluate"),
    ],
)
def test_a_setting_counts_for_the_first_stage_that_uses_it_and_none_before(store, config, section, values, first):
    fill(store, config)
    run = to_run(store, changed(config, section, **values))
    assert run[0] == first
    reused = [name for name in STAGES if name not in run]
    assert all(first not in _upstream(name) for name in reused)


def _upstream(name: StageName) -> set[str]:
    return {above for parent in STAGES[name].takes for above in (parent, *_upstream(parent))}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("train", {"log_every_steps": 3, "checkpoint_every_steps": 7, "keep_checkpoints": 9}),
        ("env", {"min_free_disk_gib": 0.1, "min_free_memory_gib": 0.1}),
    ],
)
def test_what_cannot_change_a_result_reuses_everything(store, config, section, values):
    fill(store, config)
    assert to_run(store, changed(config, section, **values)) == []


def test_the_root_and_the_folder_of_the_model_are_not_in_the_key(store, config, tmp_path, stories):
    fill(store, config)
    shutil.copytree(stories, tmp_path / "copy")
    moved = changed(config, "model", base=str(tmp_path / "copy"))
    assert to_run(store, moved.model_copy(update={"artifacts": "/elsewhere"})) == []


def test_other_weights_train_again_but_do_not_tokenize_again(store, config, tmp_path, stories):
    fill(store, config)
    shutil.copytree(stories, tmp_path / "copy")
    weights = tmp_path / "copy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert to_run(store, changed(config, "model", base=str(tmp_path / "copy")))[0] == "train"


def test_the_reason_names_the_setting_with_old_and_new_value(store, config):
    fill(store, config)
    decisions = Planner(store, changed(config, "train", learning_rate=1e-3)).plan()
    reasons = {decision.stage: decision.reason for decision in decisions}
    assert reasons["train"] == "train.learning_rate: 0.0002 -> 0.001"
    assert reasons["merge"] == "train will be made first"


def test_only_changed_code_is_said_and_can_be_accepted(store, config, monkeypatch):
    fill(store, config)
    monkeypatch.setattr("tasks.plan.code_digests", lambda module: {**code_digests(module), module: "other"})
    decision = next(one for one in Planner(store, config).plan() if one.stage == "tokenize")
    assert decision.code_only
    assert "code of tasks.tokenize changed" in decision.reason
    assert to_run(store, config, accept_code=True) == []


def test_changed_code_and_a_changed_setting_are_not_accepted(store, config, monkeypatch):
    fill(store, config)
    monkeypatch.setattr("tasks.plan.code_digests", lambda module: {module: "other"})
    assert to_run(store, changed(config, "train", seed=5), accept_code=True)[0] == "train"


def test_the_device_of_a_reusable_environment_report_is_planned_with(store, config, monkeypatch):
    fill(store, config)
    monkeypatch.setattr("tasks.plan.guess_device", lambda _: "Ascend")  # nodes are there, but the NPU is not usable
    assert to_run(store, config) == []


def test_a_damaged_environment_report_is_made_again_without_an_error(store, config):
    fill(store, config)
    (report,) = store.root.glob("validate_env/*/report.json")
    report.write_text(report.read_text().replace("CPU", "cpu"))
    assert to_run(Store(store.root), config) == ["validate_env"]


def test_why_compares_with_the_nearest_earlier_artifact(store, config):
    fill(store, config)
    fill(store, changed(config, "train", learning_rate=1e-3, seed=3))
    last = changed(config, "train", learning_rate=1e-3, seed=4)
    fill(store, last)
    decision = next(one for one in Planner(store, last).plan() if one.stage == "train")
    _, nearest, changes = explain(store, decision.ref)
    assert nearest is not None
    assert [str(change) for change in changes] == ["train.seed: 3 -> 4"]


def test_differences_name_every_leaf():
    old, new = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "e": 4}
    assert [(change.path, change.old, change.new) for change in differences(old, new)] == [
        (("a", "c"), 2, 3),
        (("d",), [1], None),
        (("e",), None, 4),
    ]


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("export", {"cache_length": 1024}, r"export\.cache_length \(1024\) is more than the 512 positions"),
        ("train", {"lora": {"target_modules": ["q_porj"]}}, r"q_porj"),
        ("data", {"train": ["/gone.json"]}, r"/gone\.json does not exist"),
        ("model", {"base": "/gone"}, r"/gone does not exist"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_before_any_work(config, section, values, message):
    with pytest.raises(InputError, match=message):
        check_inputs(changed(config, section, **values))


def test_a_precision_that_the_device_lacks_is_refused_and_can_be_planned_for_another_one(config):
    bfloat16 = changed(config, "train", precision="bfloat16")
    with pytest.raises(ConfigError, match="bfloat16"):
        check_inputs(bfloat16)
    check_inputs(changed(bfloat16, "env", device="ascend"))


def test_what_a_stage_does_not_read_is_not_looked_at(config):
    gone = changed(config, "data", train=["/gone.json"])
    check_inputs(gone, ["evaluate"])
    with pytest.raises(InputError, match="gone"):
        check_inputs(gone, ["tokenize"])
