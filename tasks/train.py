"""Stage `train`: from token shards and a base model to a LoRA adapter.

It leaves

    adapter_config.json, adapter_model.safetensors, mindtune.json   the adapter that was kept, see models/adapter.py
    optimizer.safetensors   AdamW's moments at the same step, under the weights' names, and that step
    report.json             TrainReport: settings' consequences and curves, a function of the key
    timings.json            TrainTimings
    curve.png               training and validation loss
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from schemas.config import TrainConfig
from schemas.errors import InputError
from schemas.manifest import StageJob, StageResult
from schemas.reports import TokenizeReport, TrainReport
from tasks.batches import Batch, MicroBatch, RowOrder, Rows, collate, in_order, label_room
from tasks.files import write_atomically
from tasks.locations import base_path
from tasks.precision import check_precision
from tasks.schedule import learning_rate, total_steps
from tasks.stages import StageContext

if TYPE_CHECKING:  # they need pyarrow or MindSpore, which are imported only where a training really starts
    from tasks.data.shards import TokenRows
    from tasks.models.decoder import Decoder
    from tasks.models.train_step import TrainStep
    from tasks.training import Course

log = logging.getLogger("mindtune.train")

OPTIMIZER_FILE, REPORT_FILE, TIMINGS_FILE, CURVE_FILE = (
    "optimizer.safetensors",
    "report.json",
    "timings.json",
    "curve.png",
)


@dataclass(frozen=True)
class _Data:
    """The rows of a training and how they come.

    Args:
        training: rows to train on.
        validation: rows to validate on; the same where nothing was held out.
        order: which training rows a step sees.
        lengths: tokens that rows are padded to, ascending.
        label_rooms: labels that a micro-batch of each of these lengths has room for.
        batch_size: rows in a micro-batch.
        packed: training rows may hold several records.
        end_token: id of the token that ends every answer.
    """

    training: "TokenRows"
    validation: "TokenRows"
    order: RowOrder
    lengths: tuple[int, ...]
    label_rooms: tuple[int, ...]
    batch_size: int
    packed: bool
    end_token: int

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """What a step sees, counted from 1."""
        return (self._collate(self.training, batch) for batch in self.order.micro_batches(step))

    def validation_batches(self) -> Iterator[MicroBatch]:
        """All validation rows once."""
        batches = in_order(self.validation.lengths(), self.lengths, self.batch_size)
        return (self._collate(self.validation, batch) for batch in batches)

    def shapes(self) -> tuple[MicroBatch, ...]:
        """A micro-batch of fillers of each shape."""
        return tuple(self._collate(self.training, Batch((), length)) for length in self.lengths)

    def real_token_share(self) -> float:
        """Tokens that are no padding, of those that go through the model in one pass over the training rows."""
        steps = range(1, self.order.steps_per_epoch + 1)
        padded = sum(batch.length for step in steps for batch in self.order.micro_batches(step)) * self.batch_size
        return float(self.training.lengths().sum()) / padded

    def _collate(self, rows: Rows, batch: Batch) -> MicroBatch:
        room = self.label_rooms[self.lengths.index(batch.length)]
        return collate(rows, batch.rows, self.batch_size, batch.length, room)


def run(job: StageJob, context: StageContext) -> StageResult:
    """Train and leave the adapter; goes on from a checkpoint in `job.work` where there is one.

    Raises:
        ConfigError: the device can't compute in the precision.
        InputError: base model or target modules don't fit (see models.loading, models.lora); a row is longer than the
            model has positions; the warm-up would never end.
        StageError: nothing is learned or the loss is not finite (see training.Training); interrupted.
        StoreError: the token shards are damaged.
    """
    from tasks.checkpoints import Checkpoints
    from tasks.models.device import use_device
    from tasks.models.levers import lower_precision, recompute_layers
    from tasks.models.loading import load_decoder
    from tasks.models.lora import attach_lora
    from tasks.training import Training

    train = job.config.train
    check_precision(train.precision, job.device)
    use_device(job.device)
    decoder = load_decoder(base_path(job.config.model))
    base_parameters = sum(int(parameter.size) for parameter in decoder.get_parameters())
    if train.precision != "float32":
        lower_precision(decoder, train.precision)
    if train.recompute:
        recompute_layers(decoder)
    layers = attach_lora(
        decoder,
        rank=train.lora.rank,
        alpha=train.lora.alpha,
        dropout=train.lora.dropout,
        target_modules=train.lora.target_modules,
        seed=train.seed,
    )
    data = _open_data(Path(job.inputs["tokenize"]), train, decoder.spec.positions)
    step = _make_step(decoder, train, data.packed)
    course = _plan(data, train)
    trainable = sum(int(weight.size) for weight in step.weights)
    total = base_parameters + trainable
    log.info(
        "%d of %d parameters in %d layers are trained (%.2f %%): %d steps over %d rows, padded to %s tokens",
        trainable,
        total,
        len(layers),
        100 * trainable / total,
        course.steps,
        len(data.training),
        ", ".join(map(str, data.lengths)),
    )
    checkpoints = Checkpoints(Path(job.work) / "checkpoints", train.keep_checkpoints)
    outcome = Training(step, course, checkpoints, context).run()

    progress = outcome.progress
    kept_step = progress.best_step if train.keep == "best" else progress.step
    assert progress.best_step is not None  # there is a validation after the last step
    assert kept_step is not None
    report = TrainReport(
        steps=progress.step,
        epochs=course.epoch_after(progress.step),
        trainable_parameters=trainable,
        total_parameters=total,
        adapted_layers=len(layers),
        padded_lengths=data.lengths,
        real_token_share=data.real_token_share(),
        skipped_steps=progress.skipped,
        segments_per_row=data.training.segments / len(data.training),
        curve=progress.curve,
        validation=progress.validation,
        best_step=progress.best_step,
        kept_step=kept_step,
    )
    step.restore(outcome.best if train.keep == "best" else outcome.last)
    output = Path(job.output)
    _write_adapter(output, decoder, train, job.sources["base"], data.end_token)
    _write_optimizer(output / OPTIMIZER_FILE, step, kept_step)
    write_atomically(output / REPORT_FILE, report.model_dump_json(indent=1))
    write_atomically(output / TIMINGS_FILE, outcome.timings.model_dump_json(indent=1))
    _draw_curve(output / CURVE_FILE, report)
    losses = {point.step: point.loss for point in progress.validation}
    if losses[kept_step] >= losses[0]:
        log.warning("validation loss has not improved: %.4f before, %.4f after", losses[0], losses[kept_step])
    return StageResult(
        metrics={
            "steps": report.steps,
            "train_loss": report.curve[-1].loss,
            "validation_loss_before": losses[0],
            "validation_loss": losses[kept_step],
            "trainable_parameters": trainable,
            "adapted_layers": len(layers),
            "real_token_share": report.real_token_share,
            "graph_shapes": len(report.padded_lengths),
            "skipped_steps": len(report.skipped_steps),
        },
        volatile=(TIMINGS_FILE, CURVE_FILE),
    )


def _open_data(folder: Path, train: TrainConfig, positions: int) -> _Data:
    from tasks.data.shards import TokenRows

    report = TokenizeReport.model_validate_json((folder / "report.json").read_text(encoding="utf-8"))
    training = TokenRows(folder / "train")
    validation = training if report.validation_is_training else TokenRows(folder / "validation")
    lengths = report.padded_lengths
    if lengths[-1] > positions:
        raise InputError("model.too_short", field="tokenize.max_length", value=lengths[-1], positions=positions)
    order = RowOrder(training.lengths(), lengths, train.batch_size, train.gradient_accumulation, train.seed)
    rooms = _label_rooms((training, validation), lengths, train.batch_size)
    return _Data(training, validation, order, lengths, rooms, train.batch_size, report.packing == "pack", report.eos_id)


def _label_rooms(splits: "tuple[TokenRows, TokenRows]", lengths: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """For each padded length the labels that a micro-batch needs room for, in training or in validation."""
    rooms = []
    for number, length in enumerate(lengths):
        chosen = [split.label_counts()[np.searchsorted(lengths, split.lengths()) == number] for split in splits]
        rooms.append(max(label_room(counts, batch_size, length) for counts in chosen))
    return tuple(rooms)


def _make_step(decoder: "Decoder", train: TrainConfig, packed: bool) -> "TrainStep":
    import mindspore as ms

    from tasks.models.adamw import AdamW
    from tasks.models.loss import AnswerLoss
    from tasks.models.train_step import LossScale, TrainStep

    weights = ms.ParameterTuple(decoder.trainable_params())
    optimizer = AdamW(
        weights,
        beta1=train.beta1,
        beta2=train.beta2,
        epsilon=train.epsilon,
        weight_decay=train.weight_decay,
    )
    mask_seed = train.seed if train.lora.dropout else None
    scale = LossScale() if train.scaling == "dynamic" else train.scaling
    return TrainStep(AnswerLoss(decoder), weights, optimizer, train.max_gradient_norm, mask_seed, packed, scale)


def _plan(data: _Data, train: TrainConfig) -> "Course":
    from tasks.training import Course

    steps = total_steps(train, data.order.steps_per_epoch, len(data.training))
    return Course(
        steps=steps,
        micro_batches=data.micro_batches,
        shapes=data.shapes(),
        validation=data.validation_batches,
        learning_rate=lambda step: learning_rate(step, steps, train),
        epoch_after=data.order.epoch_after,
        validate_every=train.evaluate_every_steps or data.order.steps_per_epoch,
        log_every=train.log_every_steps,
        checkpoint_every=train.checkpoint_every_steps,
        may_skip=train.scaling == "dynamic",
    )


def _write_adapter(output: Path, decoder: "Decoder", train: TrainConfig, base_digest: str, end_token: int) -> None:
    from tasks.models.adapter import Adapter, layers_of, save_adapter
    from tasks.models.lora import adapter_tensors

    adapter = Adapter(
        rank=train.lora.rank,
        alpha=train.lora.alpha,
        dropout=train.lora.dropout,
        target_modules=train.lora.target_modules,
        layers=layers_of(adapter_tensors(decoder)),
        base_digest=base_digest,
        end_token=end_token,
    )
    save_adapter(output, adapter)


def _write_optimizer(path: Path, step: "TrainStep", kept_step: int) -> None:
    from safetensors.numpy import save

    tensors = step.moments() | {"step": np.array(kept_step, np.int64)}
    write_atomically(path, save(tensors))


def _draw_curve(path: Path, report: TrainReport) -> None:
    """Training loss at each step and validation loss where it was measured, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([p.step for p in report.curve], [p.loss for p in report.curve], color="#9ab", lw=1, label="training")
    points = report.validation
    axes.plot([p.step for p in points], [p.loss for p in points], color="#036", marker="o", ms=4, label="validation")
    axes.axvline(report.kept_step, color="#888", lw=1, ls=":", label=f"kept: step {report.kept_step}")
    axes.set(xlabel="optimizer step", ylabel="loss, nats per trained token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
