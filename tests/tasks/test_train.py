"""The stage `train` on a small random Llama: what it leaves, that it is exact, and that a killed one goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from segments_from import join

from schemas.config import LlmConfig
from schemas.errors import ConfigError, InputError, StageError
from schemas.manifest import StageJob
from schemas.reports import SplitStatistics, TokenizeReport, TrainReport, TrainTimings
from tasks import train
from tasks.batches import collate
from tasks.data.shards import ShardWriter, TokenRows
from tasks.files import sha256_file
from tasks.models.spec import expected_shapes, read_spec
from tasks.stages import StageContext

PROJECT = Path(train.__file__).parent.parent
PAYLOAD = {"adapter_config.json", "adapter_model.safetensors", "mindtune.json", "optimizer.safetensors", "report.json"}
CONTEXT = StageContext(report_progress=lambda done, total, text: None, stop_requested=lambda: False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint folder of one random layer."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 48,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(1)
    shapes = expected_shapes(read_spec(folder))
    save_file(
        {name: draw.normal(size=shape, scale=0.3).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def write_rows(folder, count, seed, longest=20, packed_length=None):
    """Rows whose answer counts on from the prompt's last token: learnable, and of unequal length."""
    draw = np.random.default_rng(seed)
    with ShardWriter(folder, rows_per_shard=7, packed_length=packed_length) as writer:
        for record in range(count):
            prompt, answer = (int(draw.integers(2, 1 + longest // 2)) for _ in range(2))
            start = int(draw.integers(3, 30))
            ids = [*draw.integers(3, 39, prompt - 1).tolist(), *((start + k) % 37 + 3 for k in range(answer + 1))]
            writer.append(join([ids], [[-100] * prompt + ids[prompt:]], [(0, record)]))


def write_report(folder, rows, held_out, lengths=(32,), packing="none"):
    def statistics(rows):
        return SplitStatistics(
            records=rows, rows=rows, tokens=0, trained_tokens=0, longest=0, histogram_edges=(), histogram_counts=()
        )

    report = TokenizeReport(
        template="plain",
        read=rows + held_out,
        kept=rows + held_out,
        rejected=0,
        reasons={},
        train=statistics(rows),
        validation=statistics(held_out),
        validation_is_training=not held_out,
        packing=packing,
        padded_lengths=lengths,
        real_token_share=0.5,
        bos_id=1,
        eos_id=2,
    )
    (folder / "report.json").write_text(report.model_dump_json())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """The artifact of `tokenize`: 22 rows to train on, 9 held out."""
    folder = tmp_path_factory.mktemp("tokens")
    write_rows(folder / "train", 22, seed=2)
    write_rows(folder / "validation", 9, seed=3)
    write_report(folder, 22, 9)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory, base, tokens):
    """A function that makes a job with changed settings of `train`, in a folder of its own."""

    def make(tokens=tokens, lora=None, **settings):
        lora = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | (lora or {})
        defaults = {"epochs": 5, "learning_rate": 0.1, "warmup_steps": 3, "evaluate_every_steps": 8}
        config = LlmConfig.model_validate(
            {
                "model": {"base": str(base)},
                "data": {"train": ["unused.json"]},
                "train": {**defaults, "lora": lora, **settings},
            }
        )
        work = tmp_path_factory.mktemp("work")
        for part in ("build", "keep"):
            (work / part).mkdir()
        return StageJob(
            stage="train",
            key="k" * 64,
            run="run",
            config=config,
            inputs={"tokenize": str(tokens)},
            sources={"base": "b" * 64},
            output=str(work / "build"),
            work=str(work / "keep"),
            device="CPU",
        )

    return make


@pytest.fixture(scope="module")
def plain(job):
    """A training with the settings of `job`, and what it said."""
    made = job()
    return made, train.run(made, CONTEXT)


def digests(job):
    return {path.name: sha256_file(path) for path in Path(job.output).iterdir() if path.name in PAYLOAD}


def report_of(job):
    return TrainReport.model_validate_json((Path(job.output) / "report.json").read_text())


def loss_of_adapter(job, rows):
    """The loss with the adapter that the stage left, computed anew from its files."""
    import mindspore as ms

    from tasks.models.adapter import read_adapter
    from tasks.models.loading import load_decoder
    from tasks.models.lora import attach_adapter
    from tasks.models.loss import AnswerLoss

    decoder = load_decoder(Path(job.config.model.base))
    attach_adapter(decoder, read_adapter(Path(job.output)))
    batch = collate(rows, range(len(rows)), len(rows), 32)
    arrays = (batch.input_ids, batch.labels, batch.places, batch.segment_ids, batch.positions)
    total, count = AnswerLoss(decoder)(*map(ms.Tensor, arrays))
    return float(total) / float(count)


def test_leaves_an_adapter_its_optimizer_a_report_and_a_curve(plain, tokens):
    made, result = plain
    names = {path.name for path in Path(made.output).iterdir()}
    assert names - set(result.volatile) == PAYLOAD
    assert set(result.volatile) == {"timings.json", "curve.png"}

    report = report_of(made)
    assert report.steps == 30  # five passes of six steps over 22 rows, four at a time
    assert report.epochs == 5.0
    # q: 4 * (16 + 16), v: 4 * (16 + 8), down: 4 * (24 + 16)
    assert report.trainable_parameters == 4 * (32 + 24 + 40)
    tensors = load_file(Path(made.config.model.base) / "model.safetensors").values()
    assert report.total_parameters == report.trainable_parameters + sum(tensor.size for tensor in tensors)
    assert report.adapted_layers == 3
    assert report.padded_lengths == (32,)
    assert report.segments_per_row == 1
    lengths = TokenRows(tokens / "train").lengths()
    assert report.real_token_share == pytest.approx(lengths.sum() / (6 * 4 * 32))
    assert [point.step for point in report.curve] == list(range(1, 31))
    assert [point.step for point in report.validation] == [0, 8, 16, 24, 30]
    assert report.curve[-1].epoch == 5.0

    losses = {point.step: point.loss for point in report.validation}
    assert result.metrics == {
        "steps": 30,
        "train_loss": report.curve[-1].loss,
        "validation_loss_before": losses[0],
        "validation_loss": losses[report.kept_step],
        "trainable_parameters": report.trainable_parameters,
        "adapted_layers": 3,
        "real_token_share": report.real_token_share,
        "graph_shapes": 1,
        "skipped_steps": 0,
    }
    assert result.metrics["validation_loss"] < losses[0] - 0.2
    timings = TrainTimings.model_validate_json((Path(made.output) / "timings.json").read_text())
    assert timings.resumed_from_step == 0
    assert 0 < timings.median_step_seconds < timings.seconds
    assert timings.compile_seconds < timings.seconds
    assert (Path(made.output) / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_adapter_kept_is_the_one_whose_loss_is_reported(job, tokens, keep):
    # The rate stays so high that the last step is not the best.
    made = job(keep=keep, epochs=18, learning_rate=0.2, schedule="constant", evaluate_every_steps=6)
    train.run(made, CONTEXT)
    report = report_of(made)
    losses = {point.step: point.loss for point in report.validation}
    assert losses[report.best_step] == min(loss for step, loss in losses.items() if step > 0)
    assert report.best_step != report.steps
    assert report.kept_step == (report.best_step if keep == "best" else report.steps)
    assert loss_of_adapter(made, TokenRows(tokens / "validation")) == pytest.approx(losses[report.kept_step], rel=1e-5)
    optimizer = load_file(Path(made.output) / "optimizer.safetensors")
    assert int(optimizer["step"]) == report.kept_step
    layer = "model.layers.0.mlp.down_proj"
    assert optimizer[f"first_moment.{layer}.lora_a"].shape == (4, 24)
    assert (optimizer[f"second_moment.{layer}.lora_b"] > 0).all()


def test_training_rows_are_validated_on_where_nothing_was_held_out(job, tmp_path):
    write_rows(tmp_path / "tokens" / "train", 5, seed=2)
    (tmp_path / "tokens" / "validation").mkdir()
    write_report(tmp_path / "tokens", 5, 0)
    made = job(tokens=tmp_path / "tokens", max_steps=2, warmup_steps=0)
    train.run(made, CONTEXT)
    report = report_of(made)
    rows = TokenRows(tmp_path / "tokens" / "train")
    assert report.validation[-1].loss == pytest.approx(loss_of_adapter(made, rows), rel=1e-5)


@pytest.mark.parametrize("packing", ["pack", "buckets"])
def test_the_same_records_in_fewer_positions_are_the_same_first_step(job, tmp_path, packing):
    """One step over all records: however they are laid out, each label token weighs the same."""
    plain, other = tmp_path / "plain", tmp_path / packing
    write_rows(plain / "train", 20, seed=2)
    write_rows(plain / "validation", 4, seed=3)
    write_report(plain, 20, 4)
    write_rows(other / "train", 20, seed=2, packed_length=32 if packing == "pack" else None)
    write_rows(other / "validation", 4, seed=3)
    write_report(other, 20, 4, lengths=(8, 16, 24) if packing == "buckets" else (32,), packing=packing)
    settings = {"max_steps": 3, "batch_size": 4, "gradient_accumulation": 10, "warmup_steps": 0}
    jobs = [job(tokens=tokens, **settings) for tokens in (plain, other)]
    for made in jobs:
        train.run(made, CONTEXT)
    wanted, found = map(report_of, jobs)
    assert [point.loss for point in found.curve] == pytest.approx([point.loss for point in wanted.curve], abs=1e-5)
    assert [point.loss for point in found.validation] == pytest.approx(
        [point.loss for point in wanted.validation], abs=1e-5
    )
    assert found.real_token_share > wanted.real_token_share
    if packing == "pack":
        assert found.segments_per_row == 20 / len(TokenRows(other / "train")) > 1.5
    else:
        assert found.padded_lengths == (8, 16, 24)


def test_packed_training_rows_are_validated_on_where_nothing_was_held_out(job, tmp_path):
    folder = tmp_path / "tokens"
    write_rows(folder / "train", 12, seed=2, packed_length=32)
    (folder / "validation").mkdir()
    write_report(folder, 12, 0, packing="pack")
    made = job(tokens=folder, max_steps=2, warmup_steps=0)
    train.run(made, CONTEXT)
    apart = TokenRows(folder / "train", by_segment=True)
    assert len(apart) == 12
    assert report_of(made).validation[-1].loss == pytest.approx(loss_of_adapter(made, apart), rel=1e-5)


def test_a_float16_training_scales_its_loss_and_leaves_a_float32_adapter(job, plain, monkeypatch):
    from tasks.models.train_step import LossScale

    monkeypatch.setattr(LossScale, "FIRST", 2.0**40)  # beyond float16: the first steps overflow
    made = job(precision="float16", recompute=True, max_steps=40)
    train.run(made, CONTEXT)
    report, wanted = report_of(made), report_of(plain[0])
    assert report.skipped_steps[:6] == tuple(range(1, 7))
    assert len(report.skipped_steps) < 30
    assert [point.step for point in report.curve] == [step for step in range(1, 41) if step not in report.skipped_steps]
    assert report.validation[0].loss == pytest.approx(wanted.validation[0].loss, abs=0.01)
    assert report.validation[0].loss != wanted.validation[0].loss
    assert min(point.loss for point in report.validation) < report.validation[0].loss - 0.1
    tensors = load_file(Path(made.output) / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}


def test_recomputed_layers_make_the_same_bytes(job, plain):
    made = job(recompute=True)
    train.run(made, CONTEXT)
    assert digests(made) == digests(plain[0])


def test_what_is_only_logged_or_saved_between_does_not_change_a_byte(job, plain):
    other = job(log_every_steps=3, checkpoint_every_steps=4, keep_checkpoints=1)
    train.run(other, CONTEXT)
    assert digests(other) == digests(plain[0])
    assert digests(other).keys() == PAYLOAD


def test_another_seed_gives_another_adapter(job, plain):
    other = job(seed=1)
    train.run(other, CONTEXT)
    assert report_of(other).curve[0].loss != report_of(plain[0]).curve[0].loss  # other rows
    assert digests(other)["adapter_model.safetensors"] != digests(plain[0])["adapter_model.safetensors"]


def start_child(job):
    """The stage in a process of its own, as the runner starts it."""
    work = Path(job.output).parent
    (work / "job.json").write_text(job.model_dump_json())
    (work / "progress.jsonl").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    arguments = [sys.executable, "-P", "-m", "tasks.child", str(work), str(os.getpid())]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=work, env=environment)


def wait_for_step(job, child, step):
    progress = Path(job.output).parent / "progress.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if progress.exists() and progress.read_text().count("\n") and last_step(progress) >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not seen; log:\n{(progress.parent / 'log.txt').read_text()}")


def last_step(progress):
    whole_lines = progress.read_text().rsplit("\n", 1)[0].splitlines()
    return json.loads(whole_lines[-1])["done"]


def test_a_training_that_is_stopped_and_killed_ends_with_the_same_bytes(job):
    settings = {"max_steps": 200, "checkpoint_every_steps": 20, "evaluate_every_steps": 50, "lora": {"dropout": 0.2}}
    straight, broken = job(**settings), job(**settings)
    train.run(straight, CONTEXT)

    stopped = start_child(broken)
    wait_for_step(broken, stopped, 40)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 1
    error = json.loads((Path(broken.output).parent / "error.json").read_text())["error"]
    assert error["code"] == "stage.interrupted"

    killed = start_child(broken)
    wait_for_step(broken, killed, 100)
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    assert list(Path(broken.output).iterdir()) == []

    assert start_child(broken).wait(240) == 0
    timings = TrainTimings.model_validate_json((Path(broken.output) / "timings.json").read_text())
    assert timings.resumed_from_step >= 80
    assert digests(broken) == digests(straight)


def test_only_the_adapter_changes(job, tokens):
    import mindspore as ms

    from tasks.models.loading import load_decoder, read_tensors
    from tasks.models.lora import attach_lora

    made = job()
    folder = Path(made.config.model.base)
    decoder = load_decoder(folder)
    attach_lora(decoder, rank=2, alpha=4, dropout=0.1, target_modules=["q_proj", "gate_proj"], seed=0)
    step = train._make_step(decoder, made.config.train, packed=False)
    rows = TokenRows(tokens / "train")
    for number in (1, 2, 3):
        step([collate(rows, range(4), 4, 32)], number, 0.05)
    base = read_tensors(folder)
    seen = 0
    for parameter in decoder.get_parameters():
        if parameter.name in base:
            assert np.array_equal(parameter.asnumpy(), base[parameter.name]), parameter.name
            seen += 1
    assert seen == len(base)
    assert isinstance(step.weights, ms.ParameterTuple)
    assert {weight.name.rsplit(".", 1)[1] for weight in step.weights} == {"lora_a", "lora_b"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"warmup_steps": 30},
            InputError,
            r"train.warmup_steps \(30\) must be below the number of steps \(30, from 22",
        ),
        ({"precision": "bfloat16"}, ConfigError, r"bfloat16, but MindSpore can't compute in it on a CPU"),
        ({"lora": {"target_modules": ["qproj"]}}, InputError, r"target_modules names qproj, which match no layer"),
        # a rate that is 0 in float32: nothing moves
        ({"learning_rate": 1e-46, "warmup_steps": 0}, StageError, r"step 1 left every trainable weight unchanged"),
    ],
)
def test_what_can_not_be_trained_is_an_error(job, settings, error, message):
    with pytest.raises(error, match=message):
        train.run(job(**settings), CONTEXT)


def test_rows_beyond_the_positions_of_the_model_are_refused(job, tmp_path):
    write_rows(tmp_path / "tokens" / "train", 30, seed=2, longest=120)
    (tmp_path / "tokens" / "validation").mkdir()
    write_report(tmp_path / "tokens", 30, 0, lengths=(32, 128))
    with pytest.raises(InputError, match=r"tokenize.max_length \(128\) is more than the 48 positions"):
        train.run(job(tokens=tmp_path / "tokens"), CONTEXT)
