"""What the tests of Cells share: the device, an independent forward pass, and a small checkpoint of odd sizes."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.models.device import use_device
from tasks.models.spec import DecoderSpec, expected_shapes

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session", autouse=True)
def cpu():
    """The CPU in graph mode."""
    use_device("CPU")


@pytest.fixture(scope="session")
def numpy_llama() -> ModuleType:
    """The forward pass in NumPy (numpy_llama.py beside this file; tests are no package, so it can't be imported)."""
    spec = importlib.util.spec_from_file_location("numpy_llama", Path(__file__).with_name("numpy_llama.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class SmallModel:
    """A checkpoint folder with random weights, and the same weights as arrays."""

    folder: Path
    config: dict
    spec: DecoderSpec
    tensors: dict[str, np.ndarray]

    @property
    def sizes(self) -> dict:
        """What numpy_llama wants to know besides the weights."""
        return {
            "heads": self.spec.heads,
            "key_value_heads": self.spec.key_value_heads,
            "epsilon": self.spec.norm_epsilon,
            "theta": self.spec.rope_theta,
        }


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> SmallModel:
    """Three query heads on each of two key heads, heads wider than hidden / heads, odd sizes, a head of its own."""
    spec = DecoderSpec(
        vocabulary=37,
        hidden=21,
        intermediate=29,
        layers=2,
        heads=6,
        key_value_heads=2,
        head_size=10,
        norm_epsilon=1e-3,
        rope_theta=50.0,
        positions=64,
        tied_head=False,
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.key_value_heads,
        "head_dim": spec.head_size,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.positions,
        "tie_word_embeddings": False,
    }
    draw = np.random.default_rng(20)
    # As wide as to make attention choose: scores of a few units.
    tensors = {
        name: draw.normal(size=shape, scale=shape[-1] ** -0.5 * 1.5 if len(shape) == 2 else 1.0).astype(np.float32)
        for name, shape in expected_shapes(spec).items()
    }
    folder = tmp_path_factory.mktemp("small-model")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return SmallModel(folder, config, spec, tensors)


@pytest.fixture
def checkpoint(tmp_path, small_model):
    """A function that writes the small model with changes: tensors replaced or left out (None), settings changed."""

    def write(tensors=None, **config) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(small_model.config | config))
        changed = small_model.tensors | (tensors or {})
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, tmp_path / WEIGHTS)
        return tmp_path

    return write
