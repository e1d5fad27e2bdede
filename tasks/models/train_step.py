"""One optimizer step: gradients of the micro-batches added up, then divided, clipped and handed to AdamW.

    micro-batch --> forward, backward --> added to the sums   (once for each micro-batch)
    the sums    --> / label tokens --> clip --> AdamW --> cleared

Two graphs, so that a step may have any number of micro-batches of any number of labels, and one compiled shape.
"""

from collections.abc import Iterable

import mindspore as ms
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


class _Accumulate(nn.Cell):
    """Adds a micro-batch's loss, label count and gradients to the sums of the step.

    Args:
        loss: Cell whose outputs are the sum of the loss and the number of labels.
        weights: what the gradients are taken of; nothing else gets any.
    """

    def __init__(self, loss: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss
        self.value_and_gradients = ms.value_and_grad(loss, None, weights, has_aux=True)
        self.gradients = weights.clone("gradient", init="zeros")
        self.each = ops.HyperMap()
        self.sum = ms.Parameter(ms.Tensor(0.0, ms.float32), name="loss_sum", requires_grad=False)
        self.count = ms.Parameter(ms.Tensor(0.0, ms.float32), name="label_count", requires_grad=False)

    def construct(
        self,
        input_ids: ms.Tensor,
        labels: ms.Tensor,
        segment_ids: ms.Tensor | None = None,
        positions: ms.Tensor | None = None,
    ) -> ms.Tensor:
        """Returns the loss of the micro-batch, () float32, a sum."""
        (loss_sum, count), gradients = self.value_and_gradients(input_ids, labels, segment_ids, positions)
        self.each(_add, self.gradients, gradients)
        ops.assign_add(self.sum, loss_sum)
        ops.assign_add(self.count, count)
        return loss_sum


class _Update(nn.Cell):
    """Turns the sums of a step into one optimizer update, and clears them.

    Args:
        sums: where the step's micro-batches were added up.
        optimizer: updates the weights in place.
        max_gradient_norm: gradients are scaled down to this global norm; None: never.
    """

    def __init__(self, sums: _Accumulate, optimizer: AdamW, max_gradient_norm: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = sums.gradients
        self.sum = sums.sum
        self.count = sums.count
        self.optimizer = optimizer
        self.max_gradient_norm = max_gradient_norm
        self.each = ops.HyperMap()

    def construct(self, scalars: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        """Returns the mean loss and the gradient norm before clipping, both () float32."""
        loss = self.sum / self.count
        norm = ops.sqrt(2.0 * ops.addn(self.each(_half_squares, self.gradients))) / self.count
        factor = 1.0 / self.count
        if self.max_gradient_norm is not None:
            factor = factor * ops.minimum(self.max_gradient_norm / (norm + NORM_GUARD), 1.0)
        self.optimizer(self.each(ops.partial(_scale, factor), self.gradients), scalars)
        self.each(_clear, self.gradients)
        ops.assign(self.sum, ops.zeros_like(self.sum))
        ops.assign(self.count, ops.zeros_like(self.count))
        return loss, norm


class TrainStep:
    """One optimizer step: any number of micro-batches of one shape, then one update.

    Args:
        loss: Cell from a micro-batch's arrays to the sum of the loss and the number of labels counted.
        weights: what is trained.
        optimizer: over the same weights.
        max_gradient_norm: gradients are scaled down to this global norm; None: never.
        mask_seed: seed of the dropout masks, which are a function of it, the step and the micro-batch; None: the model
            has no dropout.
        packed: rows may hold several segments. Without it segment ids and positions stay on the host, since the causal
            mask alone does for a row of one segment, and costs a little less.
    """

    def __init__(
        self,
        loss: nn.Cell,
        weights: ms.ParameterTuple,
        optimizer: AdamW,
        max_gradient_norm: float | None,
        mask_seed: int | None = None,
        packed: bool = False,
    ) -> None:
        self.loss = loss
        self.weights = weights
        self.optimizer = optimizer
        self.mask_seed = mask_seed
        self.packed = packed
        self._accumulate = _Accumulate(loss, weights)
        self._update = _Update(self._accumulate, optimizer, max_gradient_norm)

    def compile(self, batch: MicroBatch) -> None:
        """Compile the graphs for this shape, without a step: forward, forward and backward, update."""
        tensors = self._tensors(batch)
        self.loss.set_train(False)
        self.loss.compile(*tensors)
        self._accumulate.set_train(True)
        self._accumulate.compile(*tensors)
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
            each. They are left on the device: reading them waits for the step.
        """
        self._accumulate.set_train(True)
        for number, batch in enumerate(micro_batches):
            if self.mask_seed is not None:
                draw_masks(self.loss, self.mask_seed, step * MOST_MICRO_BATCHES + number)
            self._accumulate(*self._tensors(batch))
        loss, norm = self._update(self.optimizer.scalars(step, learning_rate))
        return loss, norm

    def mean_loss(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The loss over many micro-batches, each label token weighing the same, nats; dropout off, nothing changes."""
        self.loss.set_train(False)
        sums = [self.loss(*self._tensors(batch)) for batch in micro_batches]
        return sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums)

    def state(self) -> Tensors:
        """Copies of weights and moments, by name."""
        return {parameter.name: parameter.asnumpy().copy() for parameter in self._parameters()}

    def moments(self) -> Tensors:
        """Copies of the moments, by name: `first_moment.` or `second_moment.` and the weight's name."""
        return {moment.name: moment.asnumpy().copy() for moment in self._moments()}

    def restore(self, state: Tensors) -> None:
        """Set weights and moments to what `state` gave."""
        for parameter in self._parameters():
            parameter.set_data(ms.Tensor(state[parameter.name]))

    def _parameters(self) -> list[ms.Parameter]:
        return [*self.weights, *self._moments()]

    def _moments(self) -> list[ms.Parameter]:
        return [*self.optimizer.first_moments, *self.optimizer.second_moments]

    def _tensors(self, batch: MicroBatch) -> list[ms.Tensor]:
        arrays = [batch.input_ids, batch.labels]
        if self.packed:
            arrays += [batch.segment_ids, batch.positions]
        return [ms.Tensor(array) for array in arrays]
