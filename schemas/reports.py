"""What the stages report: pydantic models, written as JSON into the artifact of the stage.

Losses are in nats per trained token, times in seconds, sizes in bytes, shares are fractions from 0 to 1.
"""

from typing import Literal

from pydantic import Field

from schemas.config import Packing, TemplateName
from schemas.manifest import Frozen

MINDIR_SPEC_VERSION = 1


class PackageFinding(Frozen):
    """One package against the tested set."""

    name: str
    found: str | None = Field(description="version installed here, None when it is missing")
    tested: str
    verdict: Literal["tested", "other version", "missing"]


class EnvReport(Frozen):
    """What `validate_env` found. Free disk and memory are looked at in every run, not here."""

    python: str
    platform: str
    machine: str
    cores: int
    total_memory_bytes: int
    packages: tuple[PackageFinding, ...]
    driver: str | None = Field(
        default=None, description="version of the NPU driver, None where its version file is absent"
    )
    cann: str | None = Field(default=None, description="version of CANN, None where its version file is absent")
    device: Literal["CPU", "Ascend"]
    device_reason: str = Field(description="why this device was taken")
    probe_error: float = Field(description="largest difference of a small product on the device from NumPy's")
    probe_seconds: float


class Rejected(Frozen):
    """A record that was not used."""

    source: str = Field(description="name of the data file")
    record: int | None = Field(default=None, description="index in the file, from 0; None: the line held no record")
    line: int | None = Field(default=None, description="line in the file, from 1, for JSON Lines")
    reason: str


class SplitStatistics(Frozen):
    """One split (train or validation) of the tokenized data."""

    records: int = Field(description="each counted once, whatever the weight of its source")
    rows: int = Field(description="rows of the shards; fewer than records where those are packed")
    tokens: int
    trained_tokens: int
    longest: int = Field(description="tokens in the longest record")
    histogram_edges: tuple[int, ...] = Field(description="record lengths, tokens; one more than counts")
    histogram_counts: tuple[int, ...]


class SourceCounts(Frozen):
    """What became of the records of one data file; without its name, which is no part of the key."""

    weight: float
    rejected: int = 0
    left_out: int = Field(default=0, description="records that a weight below 1 left out")
    held_out: int = Field(default=0, description="records among the held-out rows, each once")
    train: int = Field(default=0, description="records that are trained on")
    seen: int = Field(default=0, description="how often those are seen in an epoch, all together")


class TokenizeReport(Frozen):
    """What `tokenize` read. read = kept + left_out + rejected, and kept = the records of both splits."""

    template: TemplateName
    system: str | None = Field(default=None, description="the system turn that conversations without one were given")
    read: int
    kept: int
    left_out: int = Field(default=0, description="records that the weights of their sources left out")
    rejected: int
    reasons: dict[str, int] = Field(description="rejected records by reason")
    cut: int = Field(default=0, description="kept records whose questions were shortened (tokenize.too_long)")
    split: int = Field(default=0, description="kept records in several rows, or with their last exchanges only")
    replaced: dict[str, int] = Field(default={}, description="how often each text of data.replace was replaced")
    numbers_as_text: int = Field(default=0, description="kept records with a number as a field, read as its text")
    sources: tuple[SourceCounts, ...] = Field(
        default=(), description="by file: those of data.train in order, then of data.validation, folders spelled out"
    )
    train: SplitStatistics
    validation: SplitStatistics
    validation_is_training: bool = Field(description="nothing was held out: the training rows are evaluated")
    packing: Packing
    padded_lengths: tuple[int, ...] = Field(description="tokens that rows are padded to, ascending: the graph shapes")
    real_token_share: float = Field(description="tokens of the padded training rows that are no padding")
    bos_id: int | None = Field(description="the token before every prompt, None where the tokenizer puts none")
    eos_id: int = Field(description="the token that ends every answer")


class CurvePoint(Frozen):
    """One optimizer step on the training curve."""

    step: int
    epoch: float
    loss: float = Field(description="mean over the step's trained tokens")
    learning_rate: float
    gradient_norm: float = Field(description="before clipping")


class ValidationPoint(Frozen):
    """One validation on the held-out rows."""

    step: int
    loss: float


class TrainReport(Frozen):
    """What `train` did."""

    steps: int
    epochs: float
    trainable_parameters: int
    total_parameters: int
    adapted_layers: int
    padded_lengths: tuple[int, ...] = Field(description="tokens that rows were padded to: the graph shapes")
    real_token_share: float = Field(description="tokens that are no padding, of all that went through the model")
    skipped_steps: tuple[int, ...] = Field(description="steps left out because a gradient was not finite")
    segments_per_row: float = Field(description="records in a training row, on average; 1 without packing")
    curve: tuple[CurvePoint, ...]
    validation: tuple[ValidationPoint, ...] = Field(description="the first point, step 0, is the base model")
    best_step: int
    kept_step: int = Field(description="step of the adapter that the stage left")


class TrainTimings(Frozen):
    """Times of one training run; not a function of the key."""

    seconds: float
    compile_seconds: float
    median_step_seconds: float
    trained_tokens_per_second: float
    peak_memory_bytes: int
    resumed_from_step: int


class MergeCertificate(Frozen):
    """Proof that the merged model is the base model with the adapter attached."""

    base_digest: str
    adapter_digest: str
    merged_digest: str = Field(description="over names, shapes, types and bytes of the merged tensors")
    merged_layers: dict[str, float] = Field(description="scale of the update by layer")
    dtype: str
    probes: int = Field(description="probe prompts compared")
    max_relative_difference: float = Field(description="of the logits, relative to the largest logit")
    same_greedy_token_share: float
    tolerance: float


class ParityPoint(Frozen):
    """MindIR against Cell at one prompt length."""

    length: int
    max_relative_difference: float = Field(description="prefill of the MindIR against the Cell's whole forward pass")
    decode_relative_difference: float = Field(description="one token at a time with cache against the whole pass")


class ExportReport(Frozen):
    """What `export` proved about the MindIR."""

    cache_length: int
    prefill_chunk: int
    vocabulary: int
    graph_inputs: dict[str, tuple[int | None, ...]] = Field(description="shape by input name, None where free")
    parity: tuple[ParityPoint, ...]
    tolerance: float


class MindirSpec(Frozen):
    """What a program that runs the MindIR has to know; `mindtune.json` beside it."""

    format_version: int = MINDIR_SPEC_VERSION
    graph_file: str = Field(description="the file to load; it finds its weights beside it where they are apart")
    cache_length: int = Field(description="tokens that the KV cache holds, prompt and answer together")
    prefill_chunk: int = Field(description="tokens of a prompt that go through the graph at once")
    vocabulary: int = Field(description="logits per token; ids lie below it")


class Answer(Frozen):
    """One prompt, answered by the model before and after."""

    prompt: str
    reference: str | None
    before: str
    after: str


class Speed(Frozen):
    """Generation speed of the MindIR, one request at a time."""

    first_token_seconds: float = Field(description="median over the prompts, graph already compiled")
    tokens_per_second: float = Field(description="decoded tokens over the time after the first token")
    peak_memory_bytes: int = Field(description="of the process, main memory, with the MindIR alone loaded")


class EvalReport(Frozen):
    """The model before and after."""

    rows: int = Field(description="held-out rows that the losses are computed on")
    rows_too_long: int = Field(description="rows left out because they are longer than the KV cache")
    tokens: int = Field(description="label tokens of these rows; each weighs the same in the losses")
    loss_before: float
    loss_after: float
    perplexity_before: float
    perplexity_after: float
    token_accuracy_before: float
    token_accuracy_after: float
    validation_is_training: bool
    answers: tuple[Answer, ...]
