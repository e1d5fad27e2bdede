from pathlib import Path

import pytest
import yaml

from flows.settings import (
    PRESETS,
    artifact_root,
    change_config,
    check_overrides_belong,
    load_config,
    parse_overrides,
    preset_names,
)
from schemas.config import DataSource
from schemas.errors import ConfigError
from tasks.plan import check_inputs


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_its_files_are_there(path):
    assert path.stem in preset_names()
    check_inputs(load_config(path.stem))


def test_paths_are_relative_to_the_file(tmp_path):
    values = {"model": {"base": "base"}, "data": {"train": "a.json"}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
    config = load_config(str(tmp_path / "my.yaml"))
    assert config.model.base == str(tmp_path / "base")
    assert config.data.train == (str(tmp_path / "a.json"),)


def test_paths_in_set_are_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("stories260k", ["data.train=[own.json]", "model.base=../base"])
    assert config.data.train == (str(tmp_path / "own.json"),)
    assert config.model.base == str(tmp_path.parent / "base")


def test_a_base_model_in_a_package_or_on_a_hub_is_no_path(tmp_path):
    for location in ("pkg:some_package/model.gguf", "hf:owner/name@main", "ms:owner/name"):
        values = {"model": {"base": location, "tokenizer": location}, "data": {"train": "a.json"}}
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
        config = load_config(str(tmp_path / "my.yaml"))
        assert config.model.base == config.model.tokenizer == location
        assert load_config("stories260k", [f"model.base={location}"]).model.base == location


def test_data_may_be_globs_uris_and_mappings(tmp_path, monkeypatch):
    monkeypatch.setenv("BUCKET", "b")
    own = {"path": "own/*.csv", "weight": 0.5, "format": "alpaca", "columns": {"instruction": "question"}}
    values = {"model": {"base": "base"}, "data": {"train": ["s3://${BUCKET}/x/*.jsonl", own], "validation": own}}
    values["data"]["validation"] = {"path": "held.json"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
    data = load_config(str(tmp_path / "my.yaml")).data
    assert data.train == ("s3://b/x/*.jsonl", DataSource(**{**own, "path": str(tmp_path / "own/*.csv")}))
    assert data.validation == (DataSource(path=str(tmp_path / "held.json")),)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{path: a.json, weight: 0}", "greater than 0"),
        ("{path: a.json, wieght: 2}", "unknown setting; did you mean weight?"),
        ("{path: a.json, columns: {instructon: q}}", "'instruction'"),
    ],
)
def test_a_bad_setting_of_a_source_is_named(source, words):
    with pytest.raises(ConfigError) as caught:
        load_config("stories260k", [f"data.train=[{source}]"])
    assert words in caught.value.message


def test_held_out_records_have_no_weight():
    with pytest.raises(ConfigError, match=r"held\.json has the weight 2\.0; held-out records are seen once"):
        load_config("stories260k", ["data.validation=[{path: held.json, weight: 2}]", "data.validation_share=null"])


def test_environment_variables_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDTUNE_DATA", str(tmp_path))
    config = load_config("stories260k", ["data.train=['${MINDTUNE_DATA}/x.json']"])
    assert config.data.train == (str(tmp_path / "x.json"),)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1e-4", r"train\.learning_rat: unknown setting; did you mean learning_rate\?"),
        ("train.lora.rank=-1", r"train\.lora\.rank: .*greater than or equal to 1 \(got -1\)"),
        ("trian.epochs=1", r"trian: unknown setting; did you mean train\?"),
        ("tokenize.template=alpca", r"tokenize\.template: .*'alpaca'"),
        ("train=3", r"train: .*got 3"),
        ("train.epochs", r"--set train\.epochs is not of the form"),
        ("=3", r"--set =3 is not of the form"),
        ("train.epochs=[", r"is not of the form"),
    ],
)
def test_a_bad_setting_is_named_with_value_and_remedy(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("stories260k", [override])
    assert caught.value.exit_code == 2


def test_all_problems_come_in_one_message():
    with pytest.raises(ConfigError, match=r"(?s)rank.*epochs"):
        load_config("stories260k", ["train.epochs=-1", "train.lora.rank=0"])


def test_an_unknown_preset_lists_the_known_and_the_nearest():
    with pytest.raises(ConfigError, match=r"stories260k") as caught:
        load_config("storys260k")
    assert "Did you mean stories260k?" in caught.value.hint


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", "", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(str(tmp_path / "bad.yaml"))


def test_a_list_replaces_and_a_mapping_is_laid_over():
    assert parse_overrides(["train.epochs=1", "train.lora.rank=2", "train.lora.alpha=4"]) == {
        "train": {"epochs": 1, "lora": {"rank": 2, "alpha": 4}}
    }
    config = change_config(load_config("stories260k"), ["train.lora.target_modules=[q_proj]"])
    assert config.train.lora.target_modules == ("q_proj",)
    assert config.train.lora.rank == load_config("stories260k").train.lora.rank


def test_settings_of_an_earlier_stage_are_refused_when_one_stage_is_run():
    with pytest.raises(ConfigError, match=r"'tokenize\.max_length' is used by the stage tokenize"):
        check_overrides_belong(["tokenize.max_length=64"], "train")
    with pytest.raises(ConfigError, match=r"'model\.base' is used by the stage tokenize"):
        check_overrides_belong(["model.base=x"], "merge")
    check_overrides_belong(["train.epochs=1"], "train")
    check_overrides_belong(["evaluate.samples=1"], "train")


def test_the_root_is_the_configurations_then_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDTUNE_ARTIFACTS", str(tmp_path / "variable"))
    config = load_config("stories260k")
    assert artifact_root(config) == tmp_path / "variable"
    config = change_config(config, [f"artifacts={tmp_path / 'own'}"])
    assert artifact_root(config) == tmp_path / "own"
    monkeypatch.delenv("MINDTUNE_ARTIFACTS")
    assert artifact_root() == Path(__file__).parents[2] / "artifacts"


def test_a_key_that_stands_twice_is_refused_with_its_place(tmp_path):
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 1\nmodel: {base: b}\ntrain:\n  max_steps: 4\n")
    with pytest.raises(ConfigError, match=r"'train' stands twice.*line 4"):
        load_config(str(tmp_path / "twice.yaml"))


def test_yaml_anchors_and_merge_keys_are_understood(tmp_path):
    (tmp_path / "merge.yaml").write_text(
        "model: {base: b}\ndata: {train: [a]}\ntrain: {lora: &lora {rank: 4, alpha: 8}, epochs: 2}\n"
    )
    assert load_config(str(tmp_path / "merge.yaml")).train.lora.rank == 4
    assert parse_overrides(["train={<<: {epochs: 2}, batch_size: 1}"]) == {"train": {"epochs": 2, "batch_size": 1}}


def test_thresholds_of_the_host_can_be_changed_for_one_stage_and_the_root_can_not():
    check_overrides_belong(["env.min_free_disk_gib=0"], "train")
    with pytest.raises(ConfigError, match=r"'env\.device'"):
        check_overrides_belong(["env.device=cpu"], "train")
    with pytest.raises(ConfigError, match="'artifacts'"):
        check_overrides_belong(["artifacts=/elsewhere"], "validate_env")
