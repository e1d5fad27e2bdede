"""Prompts and answers that are longer than a row, and one training step on what is left of them.

Records that don't fit are left out and listed with their length (tokenize.too_long: drop, the default), or their
prompts are shortened and their answers stay whole (cut_prompt). No answer is ever cut, so record 2, whose answer alone
is too long, is listed in both ways.
"""

import json
import math
from typing import Any

import numpy as np
import pytest

from schemas.errors import InputError
from tasks.batches import collate
from tasks.data.shards import TokenRows
from tasks.models.spec import DecoderSpec, expected_shapes

END = 2  # of this tokenizer, one token a byte: the byte b is the token b + 3


@pytest.fixture
def tokenized(case_folder: Any, tokenize_files: Any) -> Any:
    """A function that tokenizes a file of the case."""
    folder = case_folder(6)
    longest = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_length"]

    def run(name: str, **settings: Any) -> Any:
        return tokenize_files(
            folder / name,
            tokenizer=folder / "tokenizer",
            template="alpaca-zh",
            max_length=longest,
            max_rejected_share=1.0,
            **settings,
        )

    return run


@pytest.fixture(scope="module")
def step() -> Any:
    """A training step on a small random decoder."""
    import mindspore as ms

    from tasks.models.adamw import AdamW
    from tasks.models.decoder import Decoder
    from tasks.models.device import use_device
    from tasks.models.loss import AnswerLoss
    from tasks.models.train_step import TrainStep

    use_device("CPU")
    spec = DecoderSpec(
        vocabulary=259,
        hidden=16,
        intermediate=24,
        layers=1,
        heads=4,
        key_value_heads=2,
        head_size=4,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        positions=384,
        tied_head=True,
    )
    draw = np.random.default_rng(6)
    decoder = Decoder(spec)
    tensors = {name: draw.normal(size=shape, scale=0.4) for name, shape in expected_shapes(spec).items()}
    for name, parameter in decoder.parameters_and_names():
        parameter.set_data(ms.Tensor(tensors[name].astype(np.float32)))
    weights = ms.ParameterTuple([decoder.model.norm.weight])
    optimizer = AdamW(weights, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    return TrainStep(AnswerLoss(decoder), weights, optimizer, max_gradient_norm=1.0)


def bytes_of(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def losses(step: Any, made: Any, batches: list[tuple[int, ...]]) -> list[float]:
    rows = TokenRows(made.folder / "train")
    return [float(step([collate(rows, batch, 2, 384)], 1, 1e-3)[0]) for batch in batches]


def test_what_does_not_fit_is_listed_with_its_index_and_length(tokenized: Any, step: Any) -> None:
    made = tokenized("train.json")
    assert made.trained() == [[*bytes_of("2"), END]]
    assert [item.record for item in made.rejected] == [0, 2, 3]
    prompt = len(bytes_of("### 指令\n\n\n### 输入\n\n\n### 输出\n"))
    lengths = [prompt + 1200 + 3 + 1, prompt + 9 + 1200 + 1, prompt + 3 + 1200 + 3 + 1]
    assert [item.reason for item in made.rejected] == [
        f"longer than max_length ({length} tokens)" for length in lengths
    ]
    assert made.report.reasons == {"longer than max_length": 3}
    (loss,) = losses(step, made, [(0,)])
    assert math.isfinite(loss)
    assert loss > 0


def test_a_shortened_prompt_keeps_its_end_and_the_answer_stays_whole(
    tokenized: Any, step: Any, case_folder: Any
) -> None:
    made = tokenized("train.json", too_long="cut_prompt")
    short = [*bytes_of("短"), END]
    assert made.trained() == [short, [*bytes_of("2"), END], short]
    assert [item.record for item in made.rejected] == [2]
    assert made.report.cut == 2
    records = json.loads((case_folder(6) / "train.json").read_text(encoding="utf-8"))
    for (ids, _), record in zip(made.train[::2], records[::3], strict=True):
        assert 384 - 3 < len(ids) <= 384  # another character, three bytes, would not fit
        text = bytes(i - 3 for i in ids if i > 2).decode()
        head, question, rest = text.partition((record["input"] or record["instruction"])[0] * 20)
        assert head.startswith("### 指令\n")
        assert question
        assert rest.endswith("\n\n### 输出\n短")
    # records 0 and 3 alone in a batch, and all three
    for loss in losses(step, made, [(0, 2), (0, 1), (2,)]):
        assert math.isfinite(loss)
        assert loss > 0


def test_a_file_where_nothing_is_left_stops_before_training_and_says_so(tokenized: Any, step: Any) -> None:
    with pytest.raises(
        InputError, match=r"No record is left to train on: 2 read, 2 rejected.*longer than max_length: 2"
    ):
        tokenized("all_too_long.json")
    made = tokenized("all_too_long.json", too_long="cut_prompt")
    assert made.trained() == [[*bytes_of("短"), END]] * 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses(step, made, [(0, 1)]))
