"""Writes the fixtures in data/: tiny random checkpoints of each family, and what Transformers and PEFT make of them.

    make .venv-peers/installed && .venv-peers/bin/python tests/tasks/models/families/make_fixtures.py

For each family a folder with config.json and model.safetensors as Transformers saves them, the adapter as PEFT saves it
(adapter_config.json, adapter_model.safetensors; rank 4 on all projections, B not zero), and expected.safetensors:

    input_ids, labels   (B, T); -100: no label
    base_logits         (B, T, V), of the base model
    logits              (B, T, V), with the adapter
    loss                mean over the labels
    NAME                gradient of the loss for the adapter's tensor NAME

All in float32 on PyTorch, eager attention; made with torch 2.13, transformers 4.57.6, peft 0.17.1 (peers.lock).
"""

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

ROWS, TOKENS = 2, 20
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that the three pairs are kept, between, and slowed down
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.5}),
    "llama-llama3": LlamaConfig(**SIZES, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=10),
}


def main() -> None:
    """Write all fixtures anew."""
    data = Path(__file__).with_name("data")
    for number, (name, config) in enumerate(FAMILIES.items()):
        folder = data / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(number)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
        with torch.no_grad():
            # As wide as to make attention choose, and norms and biases differ from 1 and 0.
            for parameter in model.parameters():
                scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.5
                parameter.normal_(0.0 if parameter.ndim == 2 else 0.3, scale)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        input_ids = torch.randint(config.vocab_size, (ROWS, TOKENS))
        labels = torch.where(torch.arange(TOKENS) < 6, -100, input_ids)
        base_logits = model(input_ids=input_ids).logits.detach()
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS))
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(0.0, 0.2)
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink()
        result = adapted(input_ids=input_ids, labels=labels)
        result.loss.backward()
        gradients = {
            parameter_name.replace(".default", ""): parameter.grad
            for parameter_name, parameter in adapted.named_parameters()
            if parameter.requires_grad
        }
        expected = {
            "input_ids": input_ids.int(),
            "labels": labels.int(),
            "base_logits": base_logits,
            "logits": result.logits.detach(),
            "loss": result.loss.detach(),
        }
        save_file(expected | gradients, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
