"""Packed rows against the same records in rows of their own, on a real model and real texts."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from list_rows import ListRows
from mindspore import nn
from tokenizers import Tokenizer

from tasks.batches import collate
from tasks.data.packing import place
from tasks.models.loading import load_decoder
from tasks.models.lora import attach_lora
from tasks.models.loss import AnswerLoss

LENGTH = 96
TEXTS = (
    ("Once upon a time,", " there was a little girl named Lily."),
    ("She loved to", " play outside in the park."),
    ("One day, she saw", " a big, red ball. She wanted to play with it, but it was too high."),
    ("Her mom said,", ' "Lily, let us go home."'),
    ("The dog", " ran to the tree and barked at the cat."),
    ("Tom and Ben were", " friends."),
    ("The sun was", " hot and the water was cool, so they went to swim in the lake together."),
)


@pytest.fixture(scope="module")
def records(stories):
    """Pairs (ids, labels); one trains on its first token, too, which has nothing before it."""
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    made = []
    for prompt, answer in TEXTS:
        asked = [1, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        told = [*tokenizer.encode(answer, add_special_tokens=False).ids, 2]
        made.append((asked + told, [-100] * len(asked) + told))
    ids, labels = made[3]
    made[3] = (ids, [*ids[:4], *labels[4:]])
    return made


@pytest.fixture(scope="module")
def batches(records):
    """The records in rows of their own, and packed: fewer rows, some of several segments."""
    rows = [[records[index] for index in row] for row in place([len(ids) for ids, _ in records], LENGTH)]
    assert len(rows) < len(records)
    assert max(len(row) for row in rows) > 2
    apart = ListRows(*[[record] for record in records])
    packed = ListRows(*rows)
    return [collate(rows, range(len(rows)), len(rows), LENGTH) for rows in (apart, packed)]


@dataclass
class Result:
    loss: float
    count: float
    gradients: dict


@pytest.fixture(scope="module")
def measure(stories):
    """A function from a micro-batch to loss, count and the gradients of a LoRA whose B is not zero."""
    decoder = load_decoder(stories)
    attach_lora(decoder, rank=4, alpha=8, dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], seed=1)
    draw = np.random.default_rng(4)
    weights = ms.ParameterTuple(decoder.trainable_params())
    for weight in weights:
        if weight.name.endswith("lora_b"):
            weight.set_data(ms.Tensor(draw.normal(size=weight.shape, scale=0.05).astype(np.float32)))
    call = ms.value_and_grad(AnswerLoss(decoder), None, weights, has_aux=True)

    def run(batch, packed):
        arrays = [batch.input_ids, batch.labels, batch.places] + [batch.segment_ids, batch.positions] * packed
        (loss, count), gradients = call(*map(ms.Tensor, arrays))
        named = zip(weights, gradients, strict=True)
        return Result(float(loss), float(count), {weight.name: gradient.asnumpy() for weight, gradient in named})

    return run


def test_loss_and_gradients_of_packed_rows_are_those_of_rows_of_their_own(batches, measure):
    apart, packed = measure(batches[0], packed=False), measure(batches[1], packed=True)
    assert packed.count == apart.count == batches[0].trained_tokens == batches[1].trained_tokens
    assert packed.loss / packed.count == pytest.approx(apart.loss / apart.count, abs=1e-5)
    assert apart.gradients.keys() == packed.gradients.keys()
    for name, gradient in apart.gradients.items():
        assert np.abs(gradient).max() > 1e-2, name
        np.testing.assert_allclose(packed.gradients[name] / packed.count, gradient / apart.count, atol=1e-5)


def test_rows_of_one_segment_give_the_same_with_and_without_segment_ids(batches, measure):
    without, with_ids = measure(batches[0], packed=False), measure(batches[0], packed=True)
    assert with_ids.loss == pytest.approx(without.loss, rel=1e-6)


def test_the_label_at_a_segments_start_is_not_counted(records, measure):
    (first, first_labels), (second, second_labels) = records[3], records[5]
    assert first_labels[0] != -100
    free = collate(ListRows([(second, second_labels), (first, first_labels)]), [0], 1, LENGTH)
    masked = collate(ListRows([(second, second_labels), (first, [-100, *first_labels[1:]])]), [0], 1, LENGTH)
    assert free.labels[0, len(second)] == first[0]
    found, wanted = measure(free, packed=True), measure(masked, packed=True)
    assert (found.loss, found.count) == (wanted.loss, wanted.count)
    assert all(np.array_equal(found.gradients[name], gradient) for name, gradient in wanted.gradients.items())
    assert free.trained_tokens == masked.trained_tokens


class Logits(nn.Cell):
    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, input_ids, segment_ids, positions):
        return self.decoder.logits(self.decoder(input_ids, segment_ids, positions))


def test_logits_of_a_segment_are_untouched_by_its_neighbours(stories, records):
    cell = Logits(load_decoder(stories)).set_train(False)

    def logits(*segments):
        batch = collate(ListRows(list(segments)), [0], 1, LENGTH)
        return cell(*map(ms.Tensor, (batch.input_ids, batch.segment_ids, batch.positions))).asnumpy()[0]

    before, kept, after = records[0], records[2], records[4]
    found = logits(before, kept, after)
    middle = slice(len(before[0]), len(before[0]) + len(kept[0]))
    other = logits(([(token + 7) % 512 for token in before[0]], before[1]), kept, ([5] * len(after[0]), after[1]))
    assert np.array_equal(other[middle], found[middle])
    assert not np.array_equal(other[: middle.start], found[: middle.start])
    alone = logits(kept)
    np.testing.assert_allclose(found[middle], alone[: len(kept[0])], atol=1e-4)
