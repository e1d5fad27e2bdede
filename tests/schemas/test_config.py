import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from schemas.config import LlmConfig, Section, TokenizeConfig, TrainConfig

MINIMAL: dict[str, Any] = {"model": {"base": "base"}, "data": {"train": ["a.json"]}}


def _sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                found += _sections(annotation)
    return found


@pytest.mark.parametrize("section", _sections(LlmConfig), ids=lambda section: section.__name__)
def test_every_plain_field_says_what_it_means(section):
    for name, field in section.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if not nested and name != "job":
            assert field.description, f"{section.__name__}.{name} has no description"


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="learning_rat"):
        LlmConfig.model_validate({**MINIMAL, "train": {"learning_rat": 1e-4}})


@pytest.mark.parametrize(
    ("section", "values", "fields"),
    [
        ("train", {"warmup_steps": 10, "max_steps": 10}, ("warmup_steps", "max_steps")),
        ("export", {"prefill_chunk": 64, "cache_length": 32, "parity_lengths": [1]}, ("prefill_chunk", "cache_length")),
        ("export", {"parity_lengths": [600]}, ("parity_lengths", "cache_length")),
        ("evaluate", {"max_new_tokens": 512}, ("evaluate.max_new_tokens", "export.cache_length")),
    ],
)
def test_a_contradiction_names_both_fields(section, values, fields):
    with pytest.raises(ValidationError) as caught:
        LlmConfig.model_validate({**MINIMAL, section: values})
    assert all(field in str(caught.value) for field in fields)


def test_a_system_turn_needs_a_place_in_the_template():
    assert TokenizeConfig(template="chatml", system="Be kind.").system == "Be kind."
    with pytest.raises(ValidationError, match=r"template \(plain\) has no place for a system turn; leave system out"):
        TokenizeConfig(template="plain", system="Be kind.")


def test_a_validation_file_and_a_share_contradict():
    data = {"train": ["a"], "validation": ["b"], "validation_share": 0.2}
    with pytest.raises(ValidationError, match=r"validation_share.*data\.validation"):
        LlmConfig.model_validate({**MINIMAL, "data": data})


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 2.0])
def test_learning_rate_is_above_0_and_at_most_1(value):
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate=value)


def test_a_number_as_text_means_the_same_number():
    assert TrainConfig.model_validate({"learning_rate": "3e-4"}) == TrainConfig(learning_rate=0.0003)


def test_key_fields_leave_out_what_cannot_change_the_result():
    neutral = {"log_every_steps", "checkpoint_every_steps", "keep_checkpoints", "recompute"}
    assert set(TrainConfig.model_fields) - set(TrainConfig().key_fields()) == neutral


def test_a_loss_scale_left_out_counts_as_what_it_stands_for():
    float16 = TrainConfig(precision="float16")
    assert float16.key_fields() == TrainConfig(precision="float16", loss_scale="dynamic").key_fields()
    assert float16.scaling == "dynamic"
    assert TrainConfig().scaling is None
    assert TrainConfig(loss_scale=1024).scaling == 1024


@pytest.mark.parametrize("value", [0, -1, "static", True])
def test_a_loss_scale_is_a_number_above_0_or_dynamic(value):
    with pytest.raises(ValidationError):
        TrainConfig(loss_scale=value)


def test_the_number_of_buckets_counts_where_there_are_buckets():
    assert TokenizeConfig().key_fields() == TokenizeConfig(buckets=7).key_fields()
    assert TokenizeConfig(packing="buckets").key_fields() != TokenizeConfig(packing="buckets", buckets=7).key_fields()


def test_a_configuration_is_frozen():
    config = LlmConfig.model_validate(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.train = TrainConfig(seed=1)


@pytest.mark.parametrize(
    "data", [{"train": ["a"]}, {"train": ["a"], "validation": ["b"]}, {"train": ["a"], "validation_share": 0}]
)
def test_a_configuration_survives_being_written_and_read(data):
    config = LlmConfig.model_validate({**MINIMAL, "data": data})
    assert LlmConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("data", "share"),
    [
        ({"train": ["a"]}, 0.1),
        ({"train": ["a"], "validation": ["b"]}, 0.0),
        ({"train": ["a"], "validation_share": 0}, 0.0),
        ({"train": ["a"], "validation_share": 0.3}, 0.3),
    ],
)
def test_the_share_that_is_held_out(data, share):
    assert LlmConfig.model_validate({**MINIMAL, "data": data}).data.held_out_share == share


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("train", "epochs", math.inf),
        ("env", "min_free_disk_gib", math.inf),
        ("evaluate", "temperature", math.nan),
        ("train", "batch_size", True),
        ("train", "epochs", True),
        ("evaluate", "prompts", ["\ud800"]),
        ("evaluate", "prompts", [" "]),
        ("model", "base", "a\0b"),
    ],
)
def test_a_value_that_only_looks_usable_is_refused(section, field, value):
    values = {**MINIMAL, section: {**MINIMAL.get(section, {}), field: value}}
    with pytest.raises(ValidationError, match=field):
        LlmConfig.model_validate(values)
