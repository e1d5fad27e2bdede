"""The loss of a causal language model over the tokens that have labels."""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from schemas.tables import IGNORE_LABEL
from tasks.models.layers import as_type


class AnswerLoss(nn.Cell):
    """Negative log-likelihood of the label tokens, as a sum and a count.

    The sum, not the mean: micro-batches with different numbers of labels then add up to a step in which every label
    token weighs the same. Labels come as the token ids themselves; that a position predicts the next token is brought
    in here and nowhere else.

    Args:
        decoder: Cell from ids, segment ids and positions (B, T) to hidden states (B, T, D), with a method `logits` to
            (B, T, V).
    Inputs:
        input_ids: (B, T) int32, padded on the right.
        labels: (B, T) int32, the token's id where it is trained on, -100 elsewhere. That of a row's first token is
            never counted: nothing comes before it.
        segment_ids, positions: (B, T) int32, or neither where each row is one segment; see `Decoder`. The label of a
            segment's first token is not counted: what comes before it is another text.
    Outputs:
        (sum in nats, number of label tokens counted), both () float32.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their Hugging Face names
        self.decoder = decoder

    def construct(
        self,
        input_ids: ms.Tensor,
        labels: ms.Tensor,
        segment_ids: ms.Tensor | None = None,
        positions: ms.Tensor | None = None,
    ) -> tuple[ms.Tensor, ms.Tensor]:
        """Sum and count over the whole batch."""
        hidden = self.decoder(input_ids, segment_ids, positions)[:, :-1]  # (B, T-1, D)
        targets = labels[:, 1:]  # (B, T-1): the only shift
        counted = targets != IGNORE_LABEL
        if positions is not None:
            counted = ops.logical_and(counted, positions[:, 1:] > 0)
        # Four times faster on CPU than ops.cross_entropy, forward and backward.
        logits = as_type(self.decoder.logits(hidden), ms.float32)  # (B, T-1, V)
        log_likelihood = ops.log_softmax(logits, -1)
        chosen = ops.gather_elements(log_likelihood, 2, ops.maximum(targets, 0).expand_dims(2)).squeeze(2)  # (B, T-1)
        return -ops.where(counted, chosen, ops.zeros_like(chosen)).sum(), counted.astype(ms.float32).sum()
