"""The stage `merge`: the folder that it leaves, its certificate, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf_files import sentence_piece_metadata, write_llama
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from schemas.config import LlmConfig, MergeConfig
from schemas.errors import InputError, StageError
from schemas.manifest import StageJob
from schemas.reports import MergeCertificate
from tasks import merge
from tasks.models.adapter import Adapter, read_adapter, save_adapter
from tasks.models.headers import read_headers
from tasks.models.saving import weights_digest
from tasks.models.spec import expected_shapes, match_targets, read_spec
from tasks.stages import StageContext

BASE_DIGEST = "ba" * 32
TARGETS = ("q_proj", "v_proj", "down_proj")


def make_adapter(base, targets=TARGETS, rank=4, **changes):
    """An adapter as large as training makes one: the update changes the logits well above the tolerances."""
    spec, random = read_spec(base), np.random.default_rng(7)
    shapes = expected_shapes(spec)
    layers = {}
    for layer in match_targets(targets, spec):
        out_channels, in_channels = shapes[f"{layer}.weight"]
        a = random.normal(size=(rank, in_channels), scale=in_channels**-0.5).astype(np.float32)
        layers[layer] = (a, random.normal(size=(out_channels, rank), scale=0.05).astype(np.float32))
    settings = {"rank": rank, "alpha": 8.0, "dropout": 0.1, "target_modules": targets, "layers": layers}
    return Adapter(**(settings | {"base_digest": BASE_DIGEST} | changes))


def make_job(base, adapter, folder, *, tokenizer=None, base_digest=BASE_DIGEST, **settings):
    """A job of the stage; the adapter's files lie in `folder/train`, the output in `folder/merge`."""
    for name in ("train", "merge"):
        (folder / name).mkdir(parents=True)
    save_adapter(folder / "train", adapter)
    config = {
        "model": {"base": str(base), "tokenizer": tokenizer and str(tokenizer)},
        "data": {"train": ["unused.json"]},
        "merge": settings,
    }
    return StageJob(
        stage="merge",
        key="0" * 64,
        run="test",
        config=LlmConfig.model_validate(config),
        inputs={"train": str(folder / "train")},
        sources={"base": base_digest, "tokenizer": "70" * 32},
        output=str(folder / "merge"),
        work=str(folder),
        device="CPU",
    )


def run(job, progress=None):
    reports = [] if progress is None else progress
    result = merge.run(job, StageContext(lambda *report: reports.append(report), lambda: False))
    return result, Path(job.output)


def certificate_of(folder):
    return MergeCertificate.model_validate_json((folder / "certificate.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def merged(stories, tmp_path_factory):
    """stories260K with an adapter, merged once: (job, result, output folder, progress)."""
    job = make_job(stories, make_adapter(stories), tmp_path_factory.mktemp("merged"))
    progress = []
    result, output = run(job, progress)
    return job, result, output, progress


def test_the_folder_holds_a_whole_checkpoint(merged, stories):
    output = merged[2]
    assert sorted(path.name for path in output.iterdir()) == [
        "certificate.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (stories / name).read_bytes()
    assert json.loads((output / "config.json").read_text()) == json.loads((stories / "config.json").read_text())


def test_weights_are_those_of_the_base_plus_the_scaled_update(merged, stories):
    base, found = load_file(stories / "model.safetensors"), load_file(merged[2] / "model.safetensors")
    adapter = make_adapter(stories)
    assert found.keys() == base.keys()  # no LoRA tensors, no head that the base does not have
    for name, tensor in base.items():
        pair = adapter.layers.get(name.removesuffix(".weight"))
        if pair is None:
            assert found[name].tobytes() == tensor.tobytes()
        else:
            np.testing.assert_allclose(found[name], tensor + 2.0 * pair[1] @ pair[0], atol=1e-6)
            assert np.abs(found[name] - tensor).max() > 0.05


def test_a_gguf_file_of_the_same_weights_gives_the_same_model_with_a_tokenizer_of_its_own(merged, stories, tmp_path):
    config = json.loads((stories / "config.json").read_text())
    tokenizer = sentence_piece_metadata(stories / "tokenizer.model")
    base = write_llama(tmp_path / "x.gguf", config, load_file(stories / "model.safetensors"), metadata=tokenizer)
    _, output = run(make_job(base, make_adapter(stories), tmp_path))
    assert (output / "model.safetensors").read_bytes() == (merged[2] / "model.safetensors").read_bytes()
    assert read_spec(output) == read_spec(merged[2])
    written = json.loads((output / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["torch_dtype"]) == (1, 2, "float32")
    assert json.loads((output / "tokenizer.json").read_text()) == json.loads((stories / "tokenizer.json").read_text())
    assert AutoTokenizer.from_pretrained(output).encode("Once upon a time") == [1, 403, 407, 261, 378]


def test_the_certificate_says_that_merged_and_attached_agree(merged, stories):
    _, result, output, _ = merged
    certificate = certificate_of(output)
    assert 0 < certificate.max_relative_difference <= 1e-5
    assert certificate.same_greedy_token_share == 1.0
    assert certificate.tolerance == 1e-3
    assert certificate.merged_layers == dict.fromkeys(match_targets(TARGETS, read_spec(stories)), 2.0)
    assert certificate.merged_digest == weights_digest(output)
    assert certificate.base_digest == BASE_DIGEST
    assert result.metrics["merged_layers"] == 15
    assert result.metrics["max_relative_difference"] == certificate.max_relative_difference
    assert result.volatile == ("certificate.json",)
    assert result.payload is None


def test_progress_ends_at_its_total(merged):
    progress = merged[3]
    assert [done for done, _, _ in progress] == sorted(done for done, _, _ in progress)
    assert progress[-1][:2] == (3, 3)


def test_the_same_job_gives_the_same_bytes(merged, stories, tmp_path):
    (tmp_path / "merge").mkdir()
    merge.write_merged(
        stories, read_adapter(Path(merged[0].inputs["train"])), Path("unused"), tmp_path / "merge", MergeConfig()
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "merge" / name).read_bytes() == (merged[2] / name).read_bytes()


def test_transformers_reads_configuration_and_tokenizer(merged, stories):
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(merged[2])
    assert (config.model_type, config.num_key_value_heads, config.tie_word_embeddings) == ("llama", 4, True)
    ids = AutoTokenizer.from_pretrained(merged[2])("Once upon a time").input_ids
    assert ids == AutoTokenizer.from_pretrained(stories)("Once upon a time").input_ids


def test_a_model_that_came_out_otherwise_gets_no_certificate(stories, tmp_path, monkeypatch):
    job = make_job(stories, make_adapter(stories), tmp_path)
    right = merge.merged_tensors

    def forget_the_scale(base, adapter, dtype):
        return right(base, make_adapter(stories, alpha=4.0), dtype)

    monkeypatch.setattr(merge, "merged_tensors", forget_the_scale)
    with pytest.raises(
        StageError, match=r"adapter attached by [0-9.]+ \(relative\), more than merge.tolerance \(0.001\)"
    ):
        run(job)
    assert not (tmp_path / "merge" / "certificate.json").exists()


def test_a_difference_that_is_no_number_gets_no_certificate(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "compare", lambda *_: (float("nan"), 0.0))
    with pytest.raises(StageError, match="adapter attached by nan"):
        run(make_job(stories, make_adapter(stories), tmp_path))


def test_bfloat16_weights_are_certified_within_their_rounding(stories, tmp_path):
    _, output = run(make_job(stories, make_adapter(stories), tmp_path, dtype="bfloat16"))
    certificate = certificate_of(output)
    assert 1e-5 < certificate.max_relative_difference <= 5e-2
    assert (certificate.tolerance, certificate.dtype) == (5e-2, "bfloat16")
    assert json.loads((output / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {header.dtype for header in read_headers(output).values()} == {"BF16"}


def test_a_tolerance_that_is_set_holds_for_16_bit_too(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "compare", lambda *_: (1e-3, 1.0))
    with pytest.raises(StageError, match=r"merge.tolerance \(0.0001\)"):
        run(make_job(stories, make_adapter(stories), tmp_path, dtype="float16", tolerance=1e-4))


def test_shards_say_the_same_as_one_file(merged, stories, tmp_path):
    settings = MergeConfig(max_shard_gib=300_000 / 2**30)
    digest = merge.write_merged(stories, make_adapter(stories), Path("unused"), tmp_path, settings)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert digest == weights_digest(tmp_path) == certificate_of(merged[2]).merged_digest
    whole = load_file(merged[2] / "model.safetensors")
    for path in files:
        assert path.stat().st_size < 310_000
        for name, tensor in load_file(path).items():
            np.testing.assert_array_equal(tensor, whole.pop(name))
    assert not whole


def changed_base(stories, folder, tensors=None, **config):
    """stories260K with other tensors or settings, as a checkpoint of its own."""
    shutil.copytree(stories, folder)
    settings = json.loads((stories / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if value != ""}))
    save_file(load_file(stories / "model.safetensors") | (tensors or {}), folder / "model.safetensors")
    return folder


def test_a_head_of_its_own_stays_one(stories, tmp_path):
    head = np.random.default_rng(0).normal(size=(512, 64), scale=0.2).astype(np.float32)
    base = changed_base(stories, tmp_path / "base", {"lm_head.weight": head}, tie_word_embeddings=False)
    (tmp_path / "out").mkdir()
    merge.write_merged(base, make_adapter(base), Path("unused"), tmp_path / "out", MergeConfig())
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].tobytes() == head.tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"torch_dtype": "", "dtype": "float32"}, ["dtype"]),
        ({"torch_dtype": ""}, ["torch_dtype"]),
        ({"dtype": "float32"}, ["dtype", "torch_dtype"]),
    ],
)
def test_the_type_is_written_under_the_name_that_the_base_uses(stories, tmp_path, config, names):
    base = changed_base(stories, tmp_path / "base", **config)
    (tmp_path / "out").mkdir()
    merge.write_merged(base, make_adapter(base), Path("unused"), tmp_path / "out", MergeConfig(dtype="float16"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in written if "dtype" in name} == dict.fromkeys(names, "float16")


def test_saved_rotary_frequencies_are_not_carried_on(stories, tmp_path):
    base = changed_base(stories, tmp_path / "base", {"model.rotary_emb.inv_freq": np.ones(4, np.float32)})
    (tmp_path / "out").mkdir()
    merge.write_merged(base, make_adapter(base), Path("unused"), tmp_path / "out", MergeConfig())
    assert "model.rotary_emb.inv_freq" not in load_file(tmp_path / "out" / "model.safetensors")


def test_tokenizer_files_come_from_the_tokenizer_folder_where_one_is_set(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "compare", lambda *_: (0.0, 1.0))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    _, output = run(make_job(stories, make_adapter(stories), tmp_path, tokenizer=tokenizer))
    assert (output / "tokenizer.json").read_text() == "{}"
    assert not (output / "tokenizer_config.json").exists()


def test_an_adapter_of_another_base_model_is_refused(stories, tmp_path):
    job = make_job(stories, make_adapter(stories), tmp_path, base_digest="cd" * 32)
    with pytest.raises(InputError, match=f"trained on the base model {BASE_DIGEST}, but {stories} is {'cd' * 32}"):
        run(job)
    assert not list(Path(job.output).iterdir())


def test_an_adapter_that_names_no_base_model_is_judged_by_its_layers(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "compare", lambda *_: (0.0, 1.0))
    run(make_job(stories, make_adapter(stories, base_digest=None), tmp_path / "fits"))
    layers = {"model.layers.5.self_attn.q_proj": next(iter(make_adapter(stories).layers.values()))}
    job = make_job(stories, make_adapter(stories, base_digest=None, layers=layers), tmp_path / "other")
    with pytest.raises(InputError, match=r"the model has no linear layer model\.layers\.5\.self_attn\.q_proj"):
        run(job)
    assert not list(Path(job.output).iterdir())


def test_an_adapter_that_is_not_finite_is_refused(stories, tmp_path):
    adapter = make_adapter(stories)
    adapter.layers["model.layers.2.mlp.down_proj"][1][0, 0] = np.inf
    job = make_job(stories, adapter, tmp_path)
    with pytest.raises(StageError, match=r"not finite, in model\.layers\.2\.mlp\.down_proj"):
        run(job)
    assert not list(Path(job.output).iterdir())


def test_a_float16_base_keeps_its_bits_where_nothing_was_trained(shared_data, tmp_path):
    base = shared_data / "models" / "zh-tiny-llama"
    _, output = run(make_job(base, make_adapter(base), tmp_path, dtype="float16"))
    certificate = certificate_of(output)
    assert 1e-5 < certificate.max_relative_difference <= certificate.tolerance == 1e-2
    before, after = load_file(base / "model.safetensors"), load_file(output / "model.safetensors")
    adapted = {f"{name}.weight" for name in certificate.merged_layers}
    assert before.keys() == after.keys()
    assert len(adapted) == 15
    for name in before:
        assert after[name].dtype == np.float16
        assert (after[name].tobytes() == before[name].tobytes()) == (name not in adapted)


@pytest.mark.parametrize(("own", "trained", "wanted"), [(2, 1, [1, 2]), (2, 2, 2), ([2, 5], 5, [2, 5]), (2, None, 2)])
def test_the_merged_model_stops_at_the_trained_end_token_too(stories, tmp_path, own, trained, wanted):
    base = tmp_path / "base"
    shutil.copytree(stories, base)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(config | {"eos_token_id": own}))
    adapter = make_adapter(base, end_token=trained)
    merge.write_merged(base, adapter, tmp_path, tmp_path, MergeConfig())
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == wanted
