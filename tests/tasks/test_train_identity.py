"""A real pretrained model learns who it is: 16 records, real tokens, real weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from schemas.config import LLAMA_LINEARS, LlmConfig
from schemas.manifest import StageJob
from tasks import tokenize, train
from tasks.stages import StageContext

CONTEXT = StageContext(report_progress=lambda done, total, text: None, stop_requested=lambda: False)
NAME = "Sili"


def make_job(stage, config, folder, inputs):
    for part in ("build", "keep"):
        (folder / part).mkdir(parents=True)
    return StageJob(
        stage=stage,
        key="k" * 64,
        run="run",
        config=config,
        inputs=inputs,
        sources={"base": "b" * 64, "data": "d" * 64, "tokenizer": "t" * 64},
        output=str(folder / "build"),
        work=str(folder / "keep"),
        device="CPU",
    )


@pytest.fixture(scope="module")
def trained(shared_data, stories, tmp_path_factory):
    """The English identity rows, tokenized and trained on; gives the job of `train` and its result."""
    folder = tmp_path_factory.mktemp("identity")
    records = json.loads((shared_data / "instruction" / "identity.json").read_text(encoding="utf-8"))
    english = [record for record in records if all(text.isascii() for text in record.values())]
    assert len(english) == 16
    text = json.dumps(english).replace("{{name}}", NAME).replace("{{author}}", "Toms team")
    (folder / "identity.json").write_text(text)
    config = LlmConfig.model_validate(
        {
            "model": {"base": str(stories)},
            "data": {"train": [str(folder / "identity.json")], "validation_share": 0},
            "tokenize": {"template": "plain", "max_length": 128},
            "train": {
                "lora": {"rank": 16, "alpha": 32, "target_modules": LLAMA_LINEARS},
                "max_steps": 250,
                "batch_size": 4,
                "learning_rate": 8e-3,
                "warmup_steps": 20,
                "evaluate_every_steps": 125,
            },
        }
    )
    tokens = make_job("tokenize", config, folder / "tokenize", {})
    tokenize.run(tokens, CONTEXT)
    job = make_job("train", config, folder / "train", {"tokenize": tokens.output})
    return job, train.run(job, CONTEXT)


def test_answer_loss_falls_from_about_four_and_a_half_to_below_one_half(trained):
    _, result = trained
    assert result.metrics["steps"] == 250
    assert 4.0 < result.metrics["validation_loss_before"] < 5.0
    assert result.metrics["validation_loss"] < 0.5


def test_the_greedy_answer_to_who_are_you_has_the_name(trained, stories):
    import mindspore as ms

    from tasks.data.encoding import Encoder
    from tasks.data.records import Turn
    from tasks.data.templates import TEMPLATES
    from tasks.models.adapter import read_adapter
    from tasks.models.loading import load_decoder
    from tasks.models.lora import attach_adapter

    job, _ = trained
    encoder = Encoder(stories)
    decoder = load_decoder(stories)
    attach_adapter(decoder, read_adapter(Path(job.output)))
    embedding = decoder.model.embed_tokens.weight.asnumpy()
    prompt = encoder.prompt_ids([Turn("user", "Who are you?")], TEMPLATES["plain"])
    ids = np.zeros((1, 64), np.int32)  # one shape: what stands on the right is not seen
    ids[0, : len(prompt)] = prompt
    # Not until the end token: stories260K can't give it more than 0.5 %, whatever the hidden state, because its
    # embedding is one of 200 equal ones that were never trained, and the head is tied to it.
    for place in range(len(prompt), len(prompt) + 24):
        hidden = decoder(ms.Tensor(ids)).asnumpy()[0, place - 1]
        ids[0, place] = int(np.argmax(embedding @ hidden))
    answer = encoder.decode(ids[0, len(prompt) : len(prompt) + 24].tolist())
    assert answer.startswith(f"I am {NAME}, an AI assistant")
