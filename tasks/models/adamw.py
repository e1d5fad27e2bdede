"""AdamW as a Cell: decoupled decay, bias-corrected moments, epsilon outside the square root."""

import math

import mindspore as ms
from mindspore import nn, ops

from tasks.models.many import on_each

_fused = ops.AdamWeightDecay()


def _update_one(
    beta1: float,
    beta2: float,
    rate: ms.Tensor,
    epsilon: ms.Tensor,
    decay: ms.Tensor,
    weight: ms.Parameter,
    first_moment: ms.Parameter,
    second_moment: ms.Parameter,
    gradient: ms.Tensor,
) -> ms.Tensor:
    return _fused(weight, first_moment, second_moment, rate, beta1, beta2, epsilon, decay, gradient)


_update = on_each(_update_one, "Number", "Number", *("Tensor",) * 7)


class AdamW(nn.Cell):
    """One AdamW update of some weights, each by one fused operator.

    `ops.AdamWeightDecay` knows no bias correction: it does w -= rate * (m / (sqrt(v) + epsilon) + decay * w). With
    c1 = 1 - beta1^t and c2 = 1 - beta2^t, the rate learning_rate * sqrt(c2) / c1, the epsilon epsilon * sqrt(c2) and
    the decay weight_decay * c1 / sqrt(c2) turn that into AdamW exactly; the three are functions of the step and are
    computed on the host in float64 (`scalars`). Neither `nn.AdamWeightDecay` (no correction) nor the experimental
    AdamW (ten small operators a weight) would do.

    Args:
        weights: what is trained; changed in place.
        beta1: decay of the first moment, from 0 to below 1.
        beta2: decay of the second moment, from 0 to below 1.
        epsilon: above 0; added to the root of the corrected second moment.
        weight_decay: share of a weight, times the learning rate, that is taken off it in a step.
    Inputs:
        gradients: one tensor a weight, in the order and shapes of the weights, float32.
        scalars: (3,) float32, from `scalars`.
    Outputs:
        (3,) float32, the scalars; the work is done in place.
    Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2; torch.optim.AdamW (2.13) for epsilon's place.
    """

    def __init__(
        self, weights: ms.ParameterTuple, *, beta1: float, beta2: float, epsilon: float, weight_decay: float
    ) -> None:
        super().__init__(auto_prefix=False)  # the weights keep the names under which they are saved
        self.weights = weights
        self.first_moments = weights.clone("first_moment", init="zeros")
        self.second_moments = weights.clone("second_moment", init="zeros")
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.each = ops.HyperMap()

    def scalars(self, step: int, learning_rate: float) -> ms.Tensor:
        """What the operator is given at one step.

        Args:
            step: t, from 1.
            learning_rate: of this step.

        Returns:
            (3,) float32: rate, epsilon and decay with the bias correction in them.
        """
        correction1 = 1.0 - self.beta1**step
        correction2 = math.sqrt(1.0 - self.beta2**step)
        return ms.Tensor(
            [
                learning_rate * correction2 / correction1,
                self.epsilon * correction2,
                self.weight_decay * correction1 / correction2,
            ],
            ms.float32,
        )

    def construct(self, gradients: tuple[ms.Tensor, ...], scalars: ms.Tensor) -> ms.Tensor:
        """Update weights and moments in place."""
        update = ops.partial(_update, self.beta1, self.beta2, scalars[0], scalars[1], scalars[2])
        self.each(update, self.weights, self.first_moments, self.second_moments, gradients)
        return scalars
