"""The preset identity-zh on real data: a Chinese model learns who it is, says its name, and stops."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flows.settings import load_config
from schemas.config import LlmConfig
from schemas.manifest import StageJob, StageName
from tasks import tokenize, train
from tasks.stages import StageContext

pytestmark = pytest.mark.e2e
CONTEXT = StageContext(report_progress=lambda done, total, text: None, stop_requested=lambda: False)


def make_job(stage: StageName, config: LlmConfig, folder: Path, inputs: dict[str, str]) -> StageJob:
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
def trained(shared_data: Path, tmp_path_factory: pytest.TempPathFactory):
    """The 75 Chinese identity rows of the test data, trained with the preset's settings; job and result of `train`."""
    folder = tmp_path_factory.mktemp("identity-zh")
    records = json.loads((shared_data / "instruction" / "identity.json").read_text(encoding="utf-8"))
    chinese = [record for record in records if re.search("[\u4e00-\u9fff]", record["instruction"])]
    assert len(chinese) == 75
    (folder / "identity.json").write_text(json.dumps(chinese), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINDTUNE_DATA", str(shared_data))
        config = load_config("identity-zh", [f"data.train=[{folder / 'identity.json'}]"])
    tokens = make_job("tokenize", config, folder / "tokenize", {})
    tokenize.run(tokens, CONTEXT)
    job = make_job("train", config, folder / "train", {"tokenize": tokens.output})
    return job, train.run(job, CONTEXT)


def test_answer_loss_falls_from_about_5_6_to_below_1_6(trained) -> None:
    _, result = trained
    assert 5.4 < result.metrics["validation_loss_before"] < 5.8
    assert result.metrics["validation_loss"] < 1.6


def test_the_greedy_answer_to_who_are_you_has_the_name_and_stops(trained) -> None:
    import mindspore as ms

    from tasks.data.chat_template import open_template
    from tasks.data.encoding import Encoder
    from tasks.data.records import Turn
    from tasks.models.adapter import read_adapter
    from tasks.models.loading import load_decoder
    from tasks.models.lora import attach_adapter

    job, _ = trained
    base = Path(job.config.model.base)
    encoder = Encoder(base)
    template = open_template("chatml", encoder)
    (end,) = encoder.end_ids(template)
    decoder = load_decoder(base)
    attach_adapter(decoder, read_adapter(Path(job.output)))
    embedding = decoder.model.embed_tokens.weight.asnumpy()
    prompt = encoder.prompt_ids([Turn("user", "你是谁？")], template)
    ids = np.zeros((1, 96), np.int32)  # one shape: what stands on the right is not seen
    ids[0, : len(prompt)] = prompt
    place = len(prompt)
    while place < ids.shape[1]:
        hidden = decoder(ms.Tensor(ids)).asnumpy()[0, place - 1]
        ids[0, place] = int(np.argmax(embedding @ hidden))
        if ids[0, place] == end:
            break
        place += 1
    else:
        pytest.fail(f"no end token: {encoder.decode(ids[0, len(prompt) :].tolist())}")
    answer = encoder.decode(ids[0, len(prompt) : place].tolist())
    assert "小狸" in answer
