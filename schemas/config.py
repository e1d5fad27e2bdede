"""The configuration: one frozen model per stage, composed per job.

Unknown keys are refused, contradictions name both fields, and every field says its meaning and unit. A field marked
`changes_result=False` can't change what a stage makes and stays out of its key. Lengths are in tokens, a *step* is an
optimizer step, a *micro-batch* is what goes through the model at once.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict

TemplateName = Literal["alpaca", "alpaca-zh", "chatml", "qwen", "plain", "llama2", "llama3", "tokenizer"]
DeviceChoice = Literal["auto", "cpu", "ascend"]
Packing = Literal["none", "pack", "buckets"]
Precision = Literal["float32", "float16", "bfloat16"]
RecordFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt", "text"]
RecordField = Literal[
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "conversations",
    "messages",
    "prompt",
    "completion",
    "query",
    "response",
    "text",
]

DEFAULT_VALIDATION_SHARE = 0.1

NEUTRAL: JsonDict = {"changes_result": False}  # json_schema_extra of fields that stay out of the key

LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _usable_text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be blank")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must not hold a NUL or half a surrogate pair")
    return value


Text = Annotated[str, AfterValidator(_usable_text)]


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and true as true, which pydantic would take for the number 1
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are no value here")
        return value

    def key_fields(self) -> dict[str, Any]:
        """The fields that can change a stage's result, as plain JSON values."""
        neutral = {
            name
            for name, field in type(self).model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("changes_result") is False
        }
        return self.model_dump(mode="json", exclude=neutral)


class EnvConfig(Section):
    """Stage `validate_env`: what the host must offer."""

    device: DeviceChoice = Field(
        default="auto",
        description="where to compute; `auto` takes an Ascend NPU where one is really usable, else the CPU",
    )
    min_free_disk_gib: float = Field(
        default=1.0, ge=0, description="free space wanted below the artifact root, GiB", json_schema_extra=NEUTRAL
    )
    min_free_memory_gib: float = Field(
        default=1.0, ge=0, description="free main memory wanted, GiB", json_schema_extra=NEUTRAL
    )


class ModelConfig(Section):
    """The base model that is fine-tuned."""

    base: Text = Field(
        description="folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files), a GGUF file, "
        "pkg:PACKAGE/FILE (inside an installed package), hf:OWNER/NAME@REVISION (Hugging Face hub) or "
        "ms:OWNER/NAME@REVISION (ModelScope); a revision may be left out",
        json_schema_extra=NEUTRAL,  # its content counts, by digest
    )
    tokenizer: Text | None = Field(
        default=None,
        description="folder of tokenizer files, or another location as for base; without it those of the base model",
        json_schema_extra=NEUTRAL,  # its content counts, by digest
    )


class DataSource(Section):
    """Data files with settings of their own."""

    path: Text = Field(description="a file, a folder, a glob or a URI, as in data.train")
    weight: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="how often each record is seen in an epoch: its whole part for every record, once more for the "
        "share of the records that its fraction names, chosen by a hash of their content; training files only",
    )
    format: RecordFormat | None = Field(default=None, description="instead of data.format")
    columns: dict[RecordField, Text] | None = Field(default=None, description="instead of data.columns")


class DataConfig(Section):
    """Where the records come from, and what happens to bad ones."""

    train: tuple[Text | DataSource, ...] = Field(
        min_length=1,
        description="what to train on, in this order: files (JSON array, JSON Lines, CSV, TSV, Parquet, Arrow, plain "
        "text; also .gz and .zst), folders of them, globs, or URIs of them (s3://, hdfs://, file://); a mapping gives "
        "one of them a weight, format or columns of its own",
        json_schema_extra=NEUTRAL,  # their content counts, by digest, together with weight, format and columns
    )
    validation: tuple[Text | DataSource, ...] = Field(
        default=(),
        description="data files that are held out; without any, a share of the training records is",
        json_schema_extra=NEUTRAL,
    )
    format: RecordFormat = Field(
        default="auto",
        description="what a record looks like: `alpaca` (instruction, input, output), `sharegpt` (conversations), "
        "`messages`, `prompt` (prompt and completion or response, query and response), `text`; `auto` judges each file "
        "by the keys of its first records",
    )
    columns: dict[RecordField, Text] = Field(
        default={}, description="names that the files use instead of a format's own, e.g. instruction: question"
    )
    validation_share: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share of the training records to hold out, chosen by a hash of their content; 0 holds out none, "
        "and the training records themselves are then evaluated; null: 0.1 without data.validation, which it excludes",
    )
    replace: dict[Text, Text] = Field(
        default={},
        description="texts to put in the place of others in every text of every record, e.g. a name for {{name}}; "
        "literal, all at once, before records are held out",
    )
    on_bad: Literal["skip", "stop"] = Field(
        default="skip",
        description="a record that can't be used: `skip` leaves it out, counted and listed; `stop` ends the stage",
    )
    max_rejected_share: float = Field(
        default=0.5, ge=0, le=1, description="share of rejected records above which the stage ends with `skip`, too"
    )

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> Self:
        for source in self.validation:
            if isinstance(source, DataSource) and source.weight != 1:
                raise ValueError(
                    f"validation: {source.path} has the weight {source.weight}; held-out records are seen once"
                )
        return self

    def key_fields(self) -> dict[str, Any]:
        """The fields that can change a stage's result; a share that is left out counts as what it stands for."""
        return super().key_fields() | {"validation_share": self.held_out_share}

    @property
    def held_out_share(self) -> float:
        """Share of the training records to hold out; none where there are validation files."""
        if self.validation:
            return 0.0
        return DEFAULT_VALIDATION_SHARE if self.validation_share is None else self.validation_share


class TokenizeConfig(Section):
    """Stage `tokenize`: from records to token shards."""

    template: TemplateName = Field(
        default="alpaca",
        description="how a conversation becomes prompts and answers; `tokenizer` is the tokenizer's own chat template",
    )
    system: Text | None = Field(
        default=None,
        description="system turn that is put before conversations without one; the template must have a place for it",
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="which answers of a conversation are trained on: each, or the last only"
    )
    max_length: int = Field(
        default=512, ge=8, le=131072, description="longest row, prompt and answer and end token together, tokens"
    )
    too_long: Literal["drop", "cut_prompt", "split"] = Field(
        default="drop",
        description="a record that is longer: `drop` leaves it out; `cut_prompt` shortens its questions at their "
        "beginnings, the first question first, answers stay whole; `split` makes several rows: of a plain text pieces, "
        "of a conversation whole exchanges, each row with the system turn. What does not fit even so is left out",
    )
    packing: Packing = Field(
        default="none",
        description="how rows use the positions of the graph: `none` pads each record to the length of the "
        "longest; `pack` puts several whole records into one row of max_length, kept apart by the attention mask; "
        "`buckets` pads each record to one of a few lengths",
    )
    buckets: int = Field(
        default=4, ge=2, le=16, description="padded lengths with packing `buckets`, at most; each is a graph to compile"
    )
    rows_per_shard: int = Field(default=10000, ge=1, description="rows in one Arrow file")
    workers: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="processes that turn records into tokens; 1: that of the stage alone; null: one for each usable "
        "core, at most 8, fewer for small files. The shards are the same for any number",
        json_schema_extra=NEUTRAL,
    )
    dask: Text | None = Field(
        default=None,
        description="address of a Dask scheduler, e.g. tcp://host:8786, whose workers do this instead; they need the "
        "same mindtune and libraries, not the files. Needs the extra mindtune[dask]",
        json_schema_extra=NEUTRAL,
    )

    @model_validator(mode="after")
    def _place_for_the_system_turn(self) -> Self:
        if self.system is not None and self.template == "plain":
            raise ValueError(f"template ({self.template}) has no place for a system turn; leave system out")
        return self

    def key_fields(self) -> dict[str, Any]:
        """The fields that can change a stage's result; the number of buckets only where there are any."""
        fields = super().key_fields()
        if self.packing != "buckets":
            del fields["buckets"]
        return fields


class LoraConfig(Section):
    """The low-rank adapter (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(default=8, ge=1, le=1024, description="R, the inner size of the update")
    alpha: float = Field(default=16.0, gt=0, description="the update is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the adapter's inputs set to zero in training")
    target_modules: tuple[Text, ...] = Field(
        default=("q_proj", "v_proj"),
        min_length=1,
        description="last parts of the names of the layers that get an adapter, e.g. q_proj, v_proj, down_proj",
    )

    @model_validator(mode="after")
    def _no_target_twice(self) -> Self:
        twice = sorted({name for name in self.target_modules if self.target_modules.count(name) > 1})
        if twice:
            raise ValueError(f"target_modules names {', '.join(twice)} more than once")
        return self


class TrainConfig(Section):
    """Stage `train`: the optimization."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    epochs: float = Field(default=3.0, gt=0, description="passes over the training rows; not used with max_steps")
    max_steps: int | None = Field(default=None, ge=1, description="optimizer steps, instead of epochs")
    batch_size: int = Field(default=4, ge=1, description="rows in a micro-batch")
    gradient_accumulation: int = Field(
        default=1, ge=1, description="micro-batches in an optimizer step; each label token weighs the same"
    )
    learning_rate: float = Field(default=2e-4, gt=0, le=1, description="highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="course of the learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up from 0")
    weight_decay: float = Field(default=0.01, ge=0, lt=1, description="decoupled weight decay")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of AdamW's second moment")
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    max_gradient_norm: float | None = Field(
        default=1.0, gt=0, description="gradients are scaled down to this global norm; null: never"
    )
    precision: Precision = Field(
        default="float32",
        description="type that the frozen matrices are held and computed in (level O2: norms, softmax, loss, adapter "
        "and optimizer stay float32); bfloat16 on Ascend only; float16 works on a CPU, several times slower",
    )
    loss_scale: Annotated[float, Field(gt=0)] | Literal["dynamic"] | None = Field(
        default=None,
        description="what a micro-batch's loss is multiplied by before the backward pass, and divided out of the "
        "gradients before clipping; `dynamic` halves it and leaves the step out when a gradient is not finite, and "
        "doubles it after 1000 good steps; null: `dynamic` with float16, else none",
    )
    recompute: bool = Field(
        default=False,
        description="keep only each layer's input for the backward pass and compute the layer again there: less memory "
        "for a third more work on Ascend; on a CPU MindSpore 2.7.0 does the work and saves nothing",
        json_schema_extra=NEUTRAL,
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of adapter weights, row order and dropout")
    evaluate_every_steps: int | None = Field(
        default=None, ge=1, description="optimizer steps between validations; null: once an epoch"
    )
    keep: Literal["best", "last"] = Field(
        default="best", description="which adapter the stage leaves: lowest validation loss, or the last"
    )
    log_every_steps: int = Field(
        default=10, ge=1, description="optimizer steps between log lines", json_schema_extra=NEUTRAL
    )
    checkpoint_every_steps: int = Field(
        default=50, ge=1, description="optimizer steps between checkpoints", json_schema_extra=NEUTRAL
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, description="newest checkpoints that are kept while training", json_schema_extra=NEUTRAL
    )

    def key_fields(self) -> dict[str, Any]:
        """The fields that can change a stage's result; a loss scale that is left out counts as what it stands for."""
        return super().key_fields() | {"loss_scale": self.scaling}

    @property
    def scaling(self) -> float | Literal["dynamic"] | None:
        """The loss scale that holds: the one set, or that of the precision."""
        return self.loss_scale or ("dynamic" if self.precision == "float16" else None)

    @model_validator(mode="after")
    def _warmup_within_steps(self) -> Self:
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below max_steps ({self.max_steps})")
        return self


class MergeConfig(Section):
    """Stage `merge`: base model + adapter = one model."""

    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="type of the merged weights; the sum is made in float64 and rounded once"
    )
    max_shard_gib: float = Field(default=4.0, gt=0, description="largest safetensors file, GiB")
    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="largest difference, relative to the largest logit, between adapter attached and merged; null: "
        "what rounding explains, 1e-3 for float32, 1e-2 for float16, 5e-2 for bfloat16",
    )

    @property
    def limit(self) -> float:
        """The tolerance that holds: the one set, or that of the type."""
        return self.tolerance or {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}[self.dtype]


class ExportConfig(Section):
    """Stage `export`: MindIR with a KV cache."""

    cache_length: int = Field(
        default=512, ge=16, le=131072, description="tokens that the KV cache holds, prompt and answer together"
    )
    prefill_chunk: int = Field(
        default=64, ge=2, le=4096, description="prompt tokens that go through the graph at once (the last chunk padded)"
    )
    parity_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 5, 64, 100),
        min_length=1,
        description="prompt lengths at which MindIR and Cell are compared, tokens",
    )
    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest difference between MindIR and Cell, relative to the largest logit; a model can blow "
        "rounding up: at the second token of a text SmolLM2 in float32 is 6e-5 off float64 (PyTorch 2.13)",
    )

    @model_validator(mode="after")
    def _lengths_fit_the_cache(self) -> Self:
        if self.prefill_chunk > self.cache_length:
            raise ValueError(f"prefill_chunk ({self.prefill_chunk}) must be at most cache_length ({self.cache_length})")
        if max(self.parity_lengths) > self.cache_length:
            raise ValueError(
                f"parity_lengths ({max(self.parity_lengths)}) must be at most cache_length ({self.cache_length})"
            )
        return self


class EvaluateConfig(Section):
    """Stage `evaluate`: the model before and after, on held-out rows and prompts."""

    prompts: tuple[Text, ...] = Field(
        default=(), description="instructions that are answered before and after; without any, held-out ones are taken"
    )
    samples: int = Field(default=4, ge=0, le=100, description="held-out instructions to answer when prompts is empty")
    max_rows: int = Field(default=200, ge=1, description="held-out rows that the loss is computed on, at most")
    max_new_tokens: int = Field(default=64, ge=1, description="longest answer, tokens")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy; else logits are divided by it")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="the smallest set of most likely tokens that reaches this sum is kept"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the draws where temperature is above 0")


class LlmConfig(Section):
    """The job `finetune-llm`: a causal language model with LoRA."""

    job: Literal["llm"] = Field(default="llm", description="what is fine-tuned: `llm`, a causal language model")
    model: ModelConfig
    data: DataConfig
    env: EnvConfig = Field(default_factory=EnvConfig)
    tokenize: TokenizeConfig = Field(default_factory=TokenizeConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    artifacts: Text | None = Field(
        default=None,
        description="artifact root; without it MINDTUNE_ARTIFACTS, else the folder `artifacts` of the project",
        json_schema_extra=NEUTRAL,
    )

    @model_validator(mode="after")
    def _answer_fits_the_cache(self) -> Self:
        if self.evaluate.max_new_tokens >= self.export.cache_length:
            raise ValueError(
                f"evaluate.max_new_tokens ({self.evaluate.max_new_tokens}) must be below "
                f"export.cache_length ({self.export.cache_length})"
            )
        if self.data.validation and self.data.validation_share is not None:
            raise ValueError(
                f"data.validation_share ({self.data.validation_share}) has no use beside data.validation; leave one out"
            )
        return self
