"""Case 07, training: what pads the rows weighs nothing, and the end token that looks like padding is trained."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from list_rows import ListRows

from schemas.config import TokenizeConfig
from schemas.reports import Rejected
from tasks.batches import collate
from tasks.data.encoding import Encoder
from tasks.data.masks import make_rows
from tasks.data.records import Record, exchange
from tasks.data.templates import TEMPLATES
from tasks.models.spec import DecoderSpec, expected_shapes

END = 2  # also the pad token of this tokenizer


class Rows(ListRows):
    """The rows of the case, as `tokenize` makes them."""

    def __init__(self, folder):
        encoder = Encoder(folder / "tokenizer")
        records = json.loads((folder / "train.json").read_text(encoding="utf-8"))
        turns = [exchange(record["instruction"], record["output"], record["input"]) for record in records]
        made, _ = make_rows(
            [Record("train.json", index, None, each) for index, each in enumerate(turns)],
            TEMPLATES["alpaca-zh"],
            encoder,
            TokenizeConfig(max_length=384),
        )
        assert not any(isinstance(row, Rejected) for row in made)
        super().__init__(*[[(row.input_ids, row.labels)] for each in made for row in each.rows])
        self.size = encoder.size


@pytest.fixture(scope="module")
def rows(case_folder):
    return Rows(case_folder(7))


@pytest.fixture(scope="module")
def model(rows):
    """A small random decoder over the tokenizer of the case, and its weights."""
    import mindspore as ms

    from tasks.models.decoder import Decoder
    from tasks.models.device import use_device

    use_device("CPU")
    spec = DecoderSpec(
        vocabulary=rows.size,
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
    draw = np.random.default_rng(7)
    tensors = {name: draw.normal(size=shape, scale=0.4) for name, shape in expected_shapes(spec).items()}
    decoder = Decoder(spec)
    for name, parameter in decoder.parameters_and_names():
        parameter.set_data(ms.Tensor(tensors[name].astype(np.float32)))
    sizes = {"heads": 4, "key_value_heads": 2, "epsilon": 1e-5, "theta": 10000.0}
    return decoder, tensors, sizes


@pytest.fixture(scope="module")
def wanted(rows, model):
    """Mean loss over the label tokens of the rows as they are, without any padding, in float64."""
    path = Path(__file__).parent.parent / "tasks" / "models" / "numpy_llama.py"
    module_spec = importlib.util.spec_from_file_location("numpy_llama", path)
    numpy_llama = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(numpy_llama)
    _, tensors, sizes = model
    losses = []
    for ids, labels, *_ in rows.rows:
        logits = numpy_llama.logits(tensors, ids, **sizes)
        log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-log_shares[t - 1, labels[t]] for t in range(1, len(ids)) if labels[t] != -100]
    return float(np.mean(losses))


def padded(rows, case_folder, indices, batch_size):
    """A micro-batch as the case's configuration pads it: to 384, with the end token."""
    length = json.loads((case_folder(7) / "config.json").read_text())["max_length"]
    batch = collate(rows, indices, batch_size, length)
    ids = batch.input_ids.copy()
    for place, index in enumerate(indices):
        ids[place, len(rows.row(index)[0]) :] = END
    return replace(batch, input_ids=ids)


def make_step(decoder):
    import mindspore as ms

    from tasks.models.adamw import AdamW
    from tasks.models.loss import AnswerLoss
    from tasks.models.train_step import TrainStep

    weights = ms.ParameterTuple([decoder.model.norm.weight])
    optimizer = AdamW(weights, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    return TrainStep(AnswerLoss(decoder), weights, optimizer, max_gradient_norm=None)


def test_each_label_is_the_answer_and_one_end_token(rows, case_folder):
    expected = json.loads((case_folder(7) / "expected.json").read_text(encoding="utf-8"))["records"]
    batch = padded(rows, case_folder, range(3), 3)
    for labels, record in zip(batch.labels, expected, strict=True):
        assert labels[labels != -100].tolist() == record["label_ids"]
    assert (batch.input_ids == END).sum() > 3 * 300  # the padding does look like end tokens
    assert batch.trained_tokens == sum(len(record["label_ids"]) for record in expected)


def test_loss_of_the_batch_is_the_loss_over_the_rows_without_padding(rows, model, wanted, case_folder):
    step = make_step(model[0])
    loss, _ = step([padded(rows, case_folder, range(3), 3)], 1, 0.0)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert step.mean_loss([padded(rows, case_folder, range(3), 3)]) == pytest.approx(wanted, rel=1e-5)


def test_three_accumulation_steps_are_the_same_step(rows, model, wanted, case_folder):
    one, three = make_step(model[0]), make_step(model[0])
    _, norm = one([padded(rows, case_folder, range(3), 3)], 1, 0.0)
    loss, norm_of_three = three([padded(rows, case_folder, (index,), 1) for index in range(3)], 1, 0.0)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(norm_of_three) == pytest.approx(float(norm), rel=1e-5)
    for name, moment in one.moments().items():
        np.testing.assert_allclose(three.moments()[name], moment, rtol=1e-4, atol=1e-7)
