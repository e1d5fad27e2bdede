"""The optimizer step against NumPy: a bigram model whose gradients can be written down."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from tasks.batches import MicroBatch
from tasks.models.adamw import AdamW
from tasks.models.loss import AnswerLoss
from tasks.models.train_step import LossScale, TrainStep

VOCABULARY, WIDTH, RANK = 11, 6, 3
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.99, 1e-3, 0.1


class Bigram(nn.Cell):
    """Logits of the next token are B A times the embedding of this one; A and B are trained."""

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(3)
        self.embedding = self._weight("embedding", draw.normal(size=(VOCABULARY, WIDTH)), trained=False)
        self.lora_a = self._weight("lora_a", draw.normal(size=(RANK, WIDTH)))
        self.lora_b = self._weight("lora_b", draw.normal(size=(VOCABULARY, RANK)))
        self.product = ops.MatMul(transpose_b=True)

    @staticmethod
    def _weight(name, value, trained=True):
        return ms.Parameter(ms.Tensor(0.4 * value.astype(np.float32)), name=name, requires_grad=trained)

    def construct(self, input_ids, segment_ids, positions):
        return ops.gather(self.embedding, input_ids, 0)

    def logits(self, hidden):
        rows = self.product(self.product(hidden.reshape(-1, WIDTH), self.lora_a), self.lora_b)
        return rows.reshape((*hidden.shape[:-1], VOCABULARY))


class NumpyBigram:
    """The same model and its training in float64, from the formulas."""

    def __init__(self, model: Bigram) -> None:
        self.embedding = model.embedding.asnumpy().astype(np.float64)
        self.weights = [model.lora_a.asnumpy().astype(np.float64), model.lora_b.asnumpy().astype(np.float64)]
        self.first = [np.zeros_like(weight) for weight in self.weights]
        self.second = [np.zeros_like(weight) for weight in self.weights]

    def pairs(self, rows):
        """(token, next token) wherever the next token has a label."""
        return [(ids[t - 1], labels[t]) for ids, labels in rows for t in range(1, len(ids)) if labels[t] != -100]

    def loss_and_gradients(self, rows):
        a, b = self.weights
        pairs = self.pairs(rows)
        loss, gradient_a, gradient_b = 0.0, np.zeros_like(a), np.zeros_like(b)
        for token, target in pairs:
            x = self.embedding[token]
            logits = b @ a @ x
            share = np.exp(logits - logits.max())
            share /= share.sum()
            loss -= np.log(share[target])
            error = share - np.eye(VOCABULARY)[target]
            gradient_b += np.outer(error, a @ x)
            gradient_a += np.outer(b.T @ error, x)
        return loss / len(pairs), [gradient_a / len(pairs), gradient_b / len(pairs)]

    def step(self, rows, number, rate, max_norm):
        loss, gradients = self.loss_and_gradients(rows)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for index, gradient in enumerate(gradients):
            gradient = gradient * factor
            self.first[index] = BETA1 * self.first[index] + (1 - BETA1) * gradient
            self.second[index] = BETA2 * self.second[index] + (1 - BETA2) * gradient**2
            corrected = np.sqrt(self.second[index] / (1 - BETA2**number)) + EPSILON
            self.weights[index] *= 1 - rate * DECAY
            self.weights[index] -= rate * self.first[index] / (1 - BETA1**number) / corrected
        return loss, norm


@pytest.fixture
def rows():
    """Seven rows of unequal length whose labels begin at different places."""
    draw = np.random.default_rng(5)
    made = []
    for length, prompt in ((8, 3), (5, 1), (7, 6), (3, 2), (6, 1), (4, 3), (8, 7)):
        ids = draw.integers(0, VOCABULARY, length).astype(np.int32)
        labels = ids.copy()
        labels[:prompt] = -100
        made.append((ids, labels))
    return made


def pad(rows, batch_size=4, length=8, pad_id=0, room=None):
    ids = np.full((batch_size, length), pad_id, dtype=np.int32)
    labels = np.full((batch_size, length), -100, dtype=np.int32)
    for place, (row_ids, row_labels) in enumerate(rows):
        ids[place, : len(row_ids)] = row_ids
        labels[place, : len(row_labels)] = row_labels
    segment_ids, positions = np.ones_like(ids), np.tile(np.arange(length, dtype=np.int32), (batch_size, 1))
    counted = np.flatnonzero((labels != -100) & (positions > 0))
    places = np.zeros(room or ids.size, np.int32)
    places[: len(counted)] = counted
    return MicroBatch(ids, labels, segment_ids, positions, places, 0, 0)


def make_step(max_norm=None, decay=DECAY, loss_scale=None):
    model = Bigram()
    weights = ms.ParameterTuple(model.trainable_params())
    optimizer = AdamW(weights, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, weight_decay=decay)
    return model, TrainStep(AnswerLoss(model), weights, optimizer, max_norm, loss_scale=loss_scale)


@pytest.mark.parametrize("max_norm", [None, 0.05, 100.0])
def test_losses_norms_and_weights_are_those_of_numpy(rows, max_norm):
    model, step = make_step(max_norm)
    peer = NumpyBigram(model)
    for number in range(1, 7):
        rate = 0.02 * number
        chosen = rows[number % 3 : number % 3 + 4]
        loss, norm = step([pad(chosen)], number, rate)
        wanted_loss, wanted_norm = peer.step(chosen, number, rate, max_norm)
        assert float(loss) == pytest.approx(wanted_loss, rel=1e-6)
        assert float(norm) == pytest.approx(wanted_norm, rel=1e-5)
    np.testing.assert_allclose(model.lora_a.asnumpy(), peer.weights[0], atol=2e-6)
    np.testing.assert_allclose(model.lora_b.asnumpy(), peer.weights[1], atol=2e-6)


def test_micro_batches_with_unequal_label_counts_make_the_same_step_as_one_batch(rows):
    one_model, one = make_step(0.5)
    many_model, many = make_step(0.5)
    for number in (1, 2, 3):
        loss, norm = one([pad(rows, batch_size=8)], number, 0.05)
        parts = [pad(rows[:2], batch_size=2), pad(rows[2:4], batch_size=2), pad(rows[4:6], batch_size=2)]
        loss_of_parts, norm_of_parts = many([*parts, pad(rows[6:], batch_size=2)], number, 0.05)
        assert float(loss_of_parts) == pytest.approx(float(loss), abs=1e-6)
        assert float(norm_of_parts) == pytest.approx(float(norm), abs=1e-6)
    np.testing.assert_allclose(many_model.lora_a.asnumpy(), one_model.lora_a.asnumpy(), atol=1e-5)
    np.testing.assert_allclose(many_model.lora_b.asnumpy(), one_model.lora_b.asnumpy(), atol=1e-5)


def test_pad_id_and_filler_rows_change_nothing(rows):
    plain_model, plain = make_step()
    padded_model, padded = make_step()
    plain([pad(rows[:2], batch_size=2)], 1, 0.1)
    padded([pad(rows[:2], batch_size=5, length=12, pad_id=7)], 1, 0.1)
    np.testing.assert_allclose(padded_model.lora_a.asnumpy(), plain_model.lora_a.asnumpy(), atol=1e-6)
    np.testing.assert_allclose(padded_model.lora_b.asnumpy(), plain_model.lora_b.asnumpy(), atol=1e-6)


def test_logits_where_there_are_labels_only_make_the_same_step(rows):
    whole_model, whole = make_step(0.5)
    part_model, part = make_step(0.5)
    for number in (1, 2):
        wanted, found = whole([pad(rows[:4])], number, 0.05), part([pad(rows[:4], room=13)], number, 0.05)
        assert [float(value) for value in found] == pytest.approx([float(value) for value in wanted], rel=1e-6)
    np.testing.assert_allclose(part_model.lora_a.asnumpy(), whole_model.lora_a.asnumpy(), atol=1e-6)
    np.testing.assert_allclose(part_model.lora_b.asnumpy(), whole_model.lora_b.asnumpy(), atol=1e-6)


def test_validation_weighs_each_label_token_the_same_and_changes_nothing(rows):
    model, step = make_step()
    before = step.state()
    peer, _ = NumpyBigram(model).loss_and_gradients(rows)
    loss = step.mean_loss([pad(rows[:1]), pad(rows[1:5]), pad(rows[5:])])
    assert loss == pytest.approx(peer, abs=1e-6)
    after = step.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_what_is_not_trained_stays_bit_for_bit(rows):
    model, step = make_step()
    before = model.embedding.asnumpy().copy()
    step([pad(rows[:4])], 1, 0.1)
    assert np.array_equal(model.embedding.asnumpy(), before)


def test_restored_state_goes_on_bit_for_bit(rows):
    _, straight = make_step(1.0)
    _, resumed = make_step(1.0)
    for number in (1, 2, 3):
        straight([pad(rows[:4])], number, 0.05)
    saved = straight.state()
    straight([pad(rows[3:])], 4, 0.05)
    resumed([pad(rows[:4])], 1, 0.9)  # somewhere else, and compiled
    resumed.restore(saved)
    resumed([pad(rows[3:])], 4, 0.05)
    for name, array in straight.state().items():
        assert np.array_equal(resumed.state()[name], array), name


def test_weight_decay_is_decoupled_and_scaled_by_the_learning_rate():
    # Without labels' influence: two trainings that differ in decay alone differ by the decay of the weight itself.
    rows = [(np.array([1, 2], np.int32), np.array([-100, 2], np.int32))]
    model, step = make_step(decay=0.5)
    free_model, free = make_step(decay=0.0)
    start = model.lora_b.asnumpy().copy()
    step([pad(rows)], 1, 0.1)
    free([pad(rows)], 1, 0.1)
    np.testing.assert_allclose(free_model.lora_b.asnumpy() - model.lora_b.asnumpy(), 0.1 * 0.5 * start, atol=1e-6)


@pytest.mark.parametrize("make_scale", [lambda: 1024.0, lambda: 3.0, LossScale])
def test_a_loss_scale_is_divided_out_before_clipping(rows, make_scale):
    plain_model, plain = make_step(0.05)
    scaled_model, scaled = make_step(0.05, loss_scale=make_scale())
    for number in (1, 2, 3):
        loss, norm = plain([pad(rows[:4]), pad(rows[4:])], number, 0.05)
        found_loss, found_norm = scaled([pad(rows[:4]), pad(rows[4:])], number, 0.05)
        assert float(norm) > 0.05
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
        assert float(found_norm) == pytest.approx(float(norm), rel=1e-6)
    np.testing.assert_allclose(scaled_model.lora_a.asnumpy(), plain_model.lora_a.asnumpy(), atol=1e-6)
    np.testing.assert_allclose(scaled_model.lora_b.asnumpy(), plain_model.lora_b.asnumpy(), atol=1e-6)


def test_steps_whose_gradients_overflow_leave_no_trace(rows, monkeypatch):
    monkeypatch.setattr(LossScale, "FIRST", 2.0**150)  # far beyond float32
    plain_model, plain = make_step(0.5)
    model, step = make_step(0.5, loss_scale=LossScale())
    start = step.state()
    number = 1
    while not np.isfinite(float(step([pad(rows[:4])], number, 0.05)[1])):
        after = step.state()
        assert step.loss_scale.value == 2.0 ** (150 - number)
        assert all(np.array_equal(after[name], start[name]) for name in start if name != "loss_scale")
        number += 1
    assert 10 < number < 40
    # the first good step is AdamW's first, and the sums of the bad ones are gone
    plain([pad(rows[:4])], 1, 0.05)
    np.testing.assert_allclose(model.lora_a.asnumpy(), plain_model.lora_a.asnumpy(), atol=1e-6)
    np.testing.assert_allclose(model.lora_b.asnumpy(), plain_model.lora_b.asnumpy(), atol=1e-6)


def test_a_loss_scale_falls_at_once_to_1_at_least_and_grows_slowly(monkeypatch):
    monkeypatch.setattr(LossScale, "GROWTH_STEPS", 3)
    monkeypatch.setattr(LossScale, "FIRST", 4.0)
    scale = LossScale()
    values = []
    for finite in (True, True, False, True, True, True, True, False, False, False, False, True):
        scale.after(finite)
        values.append(scale.value)
    assert values == [4, 4, 2, 2, 2, 4, 4, 2, 1, 1, 1, 1]
    assert scale.updates == 7
    other = LossScale()
    other.restore(scale.state())
    for _ in range(2):
        scale.after(True)
        other.after(True)
    assert (other.value, other.updates) == (scale.value, scale.updates) == (2, 9)
    monkeypatch.setattr(LossScale, "HIGHEST", 2.0)
    for _ in range(6):
        scale.after(True)
    assert scale.value == 2


def test_a_restored_loss_scale_goes_on_bit_for_bit(rows):
    _, straight = make_step(1.0, loss_scale=LossScale())
    _, resumed = make_step(1.0, loss_scale=LossScale())
    straight([pad(rows[:4])], 1, 0.05)
    saved = straight.state()
    straight([pad(rows[3:])], 2, 0.05)
    resumed([pad(rows[:4])], 1, 0.9)
    resumed.restore(saved)
    resumed([pad(rows[3:])], 2, 0.05)
    assert all(np.array_equal(resumed.state()[name], array) for name, array in straight.state().items())
