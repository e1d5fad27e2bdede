"""The Llama forward pass in NumPy float64, written from the papers: one head at a time, positions as complex numbers.

Not a test: what the Cells are compared with. It shares nothing with `tasks/models` but the tensor names.
"""

import numpy as np


def hidden_states(tensors, ids, *, heads, key_value_heads, epsilon, theta):
    """Hidden states (T, D) after the final norm, of one row of token ids (T,)."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    layers = sum(name.endswith("input_layernorm.weight") for name in weights)
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(layers):
        part = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + attention(part, norm(x, part["input_layernorm"], epsilon), heads, key_value_heads, theta)
        x = x + feed_forward(part, norm(x, part["post_attention_layernorm"], epsilon))
    return norm(x, weights["model.norm.weight"], epsilon)


def logits(tensors, ids, **sizes):
    """Logits (T, V) of one row of token ids (T,)."""
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return hidden_states(tensors, ids, **sizes) @ head.astype(np.float64).T


def norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + epsilon) * weight


def attention(part, x, heads, key_value_heads, theta):
    size = part["self_attn.q_proj"].shape[0] // heads
    outputs = []
    for head in range(heads):
        shared = head * key_value_heads // heads  # the key and value head that this query head uses
        query = turned(x @ part["self_attn.q_proj"][head * size : (head + 1) * size].T, theta)
        key = turned(x @ part["self_attn.k_proj"][shared * size : (shared + 1) * size].T, theta)
        value = x @ part["self_attn.v_proj"][shared * size : (shared + 1) * size].T
        rows = []
        for position in range(len(x)):
            scores = key[: position + 1] @ query[position] / np.sqrt(size)
            share = np.exp(scores - scores.max())
            rows.append(share @ value[: position + 1] / share.sum())
        outputs.append(np.stack(rows))
    return np.concatenate(outputs, axis=1) @ part["self_attn.o_proj"].T


def turned(x, theta):
    half = x.shape[1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def feed_forward(part, x):
    gate = x @ part["mlp.gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T
