"""A model that is no Llama, through all stages: tiny and random, a Qwen2 with a window, its weights in a .ckpt file."""

import json
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from command_line import STAGES, Cli

from tasks.models.spec import check_tensors, expected_shapes, read_spec

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}
SETTINGS = {
    "tokenize.packing": "pack",
    "train.max_steps": 2,
    "train.warmup_steps": 0,
    "export.cache_length": 128,
    "export.parity_lengths": [1, 5, 64],
    "evaluate.max_new_tokens": 4,
}


@pytest.fixture
def base(tmp_path: Path, stories: Path) -> Path:
    folder = tmp_path / "tiny-qwen2"
    shutil.copytree(stories, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    draw = np.random.default_rng(5)
    tensors = {
        name: draw.normal(1.0 if "norm" in name else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in expected_shapes(read_spec(folder)).items()
    }
    values = [{"name": name, "data": ms.Tensor(tensor)} for name, tensor in tensors.items()]
    ms.save_checkpoint(values, str(folder / "qwen2.ckpt"))
    return folder


@pytest.mark.e2e
def test_a_qwen2_from_a_ckpt_file_goes_through_all_stages(cli: Cli, base: Path) -> None:
    chosen = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    answer = cli("run", "stories260k", "--set", f"model.base={base}", *chosen, "--json")
    assert answer.code == 0, answer.err
    assert answer.actions() == dict.fromkeys(STAGES, "ran")
    stages = {stage["stage"]: stage for stage in answer.document["stages"]}
    assert stages["train"]["metrics"]["adapted_layers"] == 14
    assert stages["merge"]["metrics"]["max_relative_difference"] < 1e-4
    assert stages["export"]["metrics"]["max_relative_difference"] < 1e-4
    merged = Path(stages["merge"]["path"])
    assert read_spec(merged) == read_spec(base)
    check_tensors(merged, read_spec(base))
    assert json.loads((merged / "config.json").read_text(encoding="utf-8"))["architectures"] == ["Qwen2ForCausalLM"]
