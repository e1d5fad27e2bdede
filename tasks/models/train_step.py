"""One optimizer step: gradients of the micro-batches added up, then divided, clipped and handed to AdamW.

    micro-batch --> forward, * scale, backward, / scale --> added to the sums   (once for each micro-batch)
    the sums    --> / label tokens --> clip --> AdamW --> cleared

Two graphs, so that a step may have any number of micro-batches of any number of labels, and one compiled shape.
"""

from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from tasks.batches import MicroBatch
from tasks.checkpoints import Tensors
from tasks.models.adamw import AdamW
from tasks.models.dropout import draw_masks
from tasks.models.many import on_each

NORM_GUARD = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping agrees with it

MOST_MICRO_BATCHES = 2**20  # in one step; keeps the draws of different steps apart

_half_square = ops.L2Loss()


def _half_square_of(gradient: ms.Tensor) -> ms.Tensor:
    return _half_square(gradient)  # half the sum of squares, () float32


def _add_to(total: ms.Parameter, gradient: ms.Tensor) -> ms.Tensor:
    return ops.assign_add(total, gradient)


def _times(factor: ms.Tensor, gradient: ms.Tensor) -> ms.Tensor:
    return gradient * factor


def _to_zero(total: ms.Parameter) -> ms.Tensor:
    return ops.assign(total, ops.zeros_like(total))


_half_squares = on_each(_half_square_of, "Tensor")
_add = on_each(_add_to, "Tensor", "Tensor")
_scale = on_each(_times, "Tensor", "Tensor")
_clear = on_each(_to_zero, "Tensor")


class _Scaled(nn.Cell):
    """The loss, times a factor, and beside it the loss itself and the number of labels."""

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(
        self,
        factor: ms.Tensor | None,
        input_ids: ms.Tensor,
        labels: ms.Tensor,
        places: ms.Tensor,
        segment_ids: ms.Tensor | None = None,
        positions: ms.Tensor | None = None,
    ) -> tuple[ms.Tensor, ms.Tensor, ms.Tensor]:
        """The first is what the gradients are taken of."""
        loss_sum, count = self.loss(input_ids, labels, places, segment_ids, positions)
        scaled = loss_sum if factor is None else loss_sum * factor
        return scaled, loss_sum, count


class _Accumulate(nn.Cell):
    """Adds a micro-batch's loss, label count and gradients to the sums of the step.

    Args:
        loss: Cell whose outputs are the sum of the loss and the number of labels.
        weights: what the gradients are taken of; nothing else gets any.
    Inputs:
        factor: () float32, what the loss is multiplied by before the backward pass and the gradients are divided by
            after it; None: neither.
        input_ids, labels, places, segment_ids, positions: the micro-batch.
    """

    def __init__(self, loss: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.value_and_gradients = ms.value_and_grad(_Scaled(loss), None, weights, has_aux=True)
        self.gradients = weights.clone("gradient", init="zeros")
        self.each = ops.HyperMap()
        self.sum = ms.Parameter(ms.Tensor(0.0, ms.float32), name="loss_sum", requires_grad=False)
        self.count = ms.Parameter(ms.Tensor(0.0, ms.float32), name="label_count", requires_grad=False)

    def construct(
        self,
        factor: ms.Tensor | None,
        input_ids: ms.Tensor,
        labels: ms.Tensor,
        places: ms.Tensor,
        segment_ids: ms.Tensor | None = None,
        positions: ms.Tensor | None = None,
    ) -> ms.Tensor:
        """Returns the loss of the micro-batch, () float32, a sum."""
        (_, loss_sum, count), gradients = self.value_and_gradients(
            factor, input_ids, labels, places, segment_ids, positions
        )
        if factor is not None:
            gradients = self.each(ops.partial(_scale, 1.0 / factor), gradients)
        self.each(_add, self.gradients, gradients)
        ops.assign_add(self.sum, loss_sum)
        ops.assign_add(self.count, count)
        return loss_sum


class _Finite(nn.Cell):
    """Says whether the gradients that were added up are finite: () bool."""

    def __init__(self, sums: _Accumulate) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = sums.gradients
        self.each = ops.HyperMap()

    def construct(self) -> ms.Tensor:
        """See the class."""
        return ops.isfinite(ops.addn(self.each(_half_squares, self.gradients)))


class _Update(nn.Cell):
    """Turns the sums of a step into one optimizer update, and clears them.

    Args:
        sums: where the step's micro-batches were added up.
        optimizer: updates the weights in place; None: the sums are cleared only.
        max_gradient_norm: gradients are scaled down to this global norm; None: never.
    """

    def __init__(self, sums: _Accumulate, optimizer: AdamW | None, max_gradient_norm: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = sums.gradients
        self.sum = sums.sum
        self.count = sums.count
        self.optimizer: Any = optimizer
        self.max_gradient_norm = max_gradient_norm
        self.updates = optimizer is not None
        self.each = ops.HyperMap()

    def construct(self, scalars: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        """Returns the mean loss and the gradient norm before clipping, both () float32."""
        loss = self.sum / self.count
        norm = ops.sqrt(2.0 * ops.addn(self.each(_half_squares, self.gradients))) / self.count
        if self.updates:
            self.apply(norm, scalars)
        self.each(_clear, self.gradients)
        ops.assign(self.sum, ops.zeros_like(self.sum))
        ops.assign(self.count, ops.zeros_like(self.count))
        return loss, norm

    def apply(self, norm: ms.Tensor, scalars: ms.Tensor) -> None:
        """The update itself."""
        factor = 1.0 / self.count
        if self.max_gradient_norm is not None:
            factor = factor * ops.minimum(self.max_gradient_norm / (norm + NORM_GUARD), 1.0)
        self.optimizer(self.each(ops.partial(_scale, factor), self.gradients), scalars)


class LossScale:
    """A loss scale that follows what the gradients allow.

    Half after a step whose gradients are not finite, down to 1; twice after GROWTH_STEPS good ones, up to its highest.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; first value as torch.amp.GradScaler (2.13).
    """

    FIRST, HIGHEST = 2.0**16, 2.0**24
    GROWTH_STEPS = 1000

    def __init__(self) -> None:
        self.value = self.FIRST
        self.updates = 0  # steps that were not left out: what AdamW's bias correction counts
        self._good = 0  # of them since the last change

    def after(self, finite: bool) -> None:
        """Take note of a step."""
        if not finite:
            self.value, self._good = max(self.value / 2, 1.0), 0
            return
        self.updates += 1
        self._good += 1
        if self._good == self.GROWTH_STEPS:
            self.value, self._good = min(self.value * 2, self.HIGHEST), 0

    def state(self) -> Tensors:
        """All of it, as an array."""
        return {"loss_scale": np.array([self.value, self.updates, self._good])}

    def restore(self, state: Tensors) -> None:
        """Set to what `state` gave."""
        value, updates, good = state["loss_scale"]
        self.value, self.updates, self._good = float(value), int(updates), int(good)


class TrainStep:
    """One optimizer step: any number of micro-batches, then one update.

    Args:
        loss: Cell from a micro-batch's arrays to the sum of the loss and the number of labels counted.
        weights: what is trained.
        optimizer: over the same weights.
        max_gradient_norm: gradients are scaled down to this global norm; None: never.
        mask_seed: seed of the dropout masks, which are a function of it, the step and the micro-batch; None: the model
            has no dropout.
        packed: rows may hold several segments. Without it segment ids and positions stay on the host, since the causal
            mask alone does for a row of one segment, and costs a little less.
        loss_scale: what the loss, as a mean over a micro-batch's positions, is multiplied by before the backward pass;
            a LossScale also leaves out steps
            whose gradients are not finite; None: nothing.
    """

    def __init__(
        self,
        loss: nn.Cell,
        weights: ms.ParameterTuple,
        optimizer: AdamW,
        max_gradient_norm: float | None,
        mask_seed: int | None = None,
        packed: bool = False,
        loss_scale: float | LossScale | None = None,
    ) -> None:
        self.loss = loss
        self.weights = weights
        self.optimizer = optimizer
        self.mask_seed = mask_seed
        self.packed = packed
        self.loss_scale = loss_scale
        self._accumulate = _Accumulate(loss, weights)
        self._update = _Update(self._accumulate, optimizer, max_gradient_norm)
        # Graphs of their own, chosen between on the host: an `if` in the update's graph made NaN of weights that had
        # been set by Parameter.set_data after the first step (MindSpore 2.7.0, CPU).
        self._finite = _Finite(self._accumulate)
        self._discard = _Update(self._accumulate, None, None)

    def compile(self, batch: MicroBatch) -> None:
        """Compile the graphs for this shape, without a step: forward, forward and backward, update."""
        tensors = self._tensors(batch)
        self.loss.set_train(False)
        self.loss.compile(*tensors)
        self._accumulate.set_train(True)
        self._accumulate.compile(self._factor(batch), *tensors)
        self._update.compile(self.optimizer.scalars(1, 0.0))

    def __call__(
        self, micro_batches: Iterable[MicroBatch], step: int, learning_rate: float
    ) -> tuple[ms.Tensor, ms.Tensor]:
        """Do one step.

        Args:
            micro_batches: of the step; every label token in them weighs the same.
            step: from 1.
            learning_rate: of this step.

        Returns:
            Mean loss over the step's label tokens (nats) and the global gradient norm before clipping, () float32
            each. They are left on the device: reading them waits for the step. With a LossScale a norm that is not
            finite says that the step was left out; finding out waits for each step.
        """
        self._accumulate.set_train(True)
        for number, batch in enumerate(micro_batches):
            if self.mask_seed is not None:
                draw_masks(self.loss, self.mask_seed, step * MOST_MICRO_BATCHES + number)
            self._accumulate(self._factor(batch), *self._tensors(batch))
        if not isinstance(self.loss_scale, LossScale):
            loss, norm = self._update(self.optimizer.scalars(step, learning_rate))
            return loss, norm
        finite = bool(self._finite())
        self.loss_scale.after(finite)
        scalars = self.optimizer.scalars(max(1, self.loss_scale.updates), learning_rate)
        loss, norm = self._update(scalars) if finite else self._discard(scalars)
        return loss, norm

    def mean_loss(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The loss over many micro-batches, each label token weighing the same, nats; dropout off, nothing changes."""
        self.loss.set_train(False)
        sums = [self.loss(*self._tensors(batch)) for batch in micro_batches]
        return sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums)

    def state(self) -> Tensors:
        """Copies of weights and moments, and a LossScale's state, by name."""
        state = {parameter.name: parameter.asnumpy().copy() for parameter in self._parameters()}
        return state | self.loss_scale.state() if isinstance(self.loss_scale, LossScale) else state

    def moments(self) -> Tensors:
        """Copies of the moments, by name: `first_moment.` or `second_moment.` and the weight's name."""
        return {moment.name: moment.asnumpy().copy() for moment in self._moments()}

    def restore(self, state: Tensors) -> None:
        """Set all to what `state` gave."""
        for parameter in self._parameters():
            parameter.set_data(ms.Tensor(state[parameter.name]))
        if isinstance(self.loss_scale, LossScale):
            self.loss_scale.restore(state)

    def _parameters(self) -> list[ms.Parameter]:
        return [*self.weights, *self._moments()]

    def _moments(self) -> list[ms.Parameter]:
        return [*self.optimizer.first_moments, *self.optimizer.second_moments]

    def _factor(self, batch: MicroBatch) -> ms.Tensor | None:
        """What the sum of the loss is multiplied by: the scale over the positions, as if it were a mean over them."""
        if self.loss_scale is None:
            return None
        scale = self.loss_scale.value if isinstance(self.loss_scale, LossScale) else self.loss_scale
        return ms.Tensor(scale / batch.labels.size, ms.float32)

    def _tensors(self, batch: MicroBatch) -> list[ms.Tensor]:
        arrays = [batch.input_ids, batch.labels, batch.places]
        if self.packed:
            arrays += [batch.segment_ids, batch.positions]
        return [ms.Tensor(array) for array in arrays]
