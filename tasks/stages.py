"""The six stages of a job as a table, and the contract between a stage and its runner.

A stage is a module `tasks.<name>` with `run(job, context) -> StageResult`: it reads the artifacts and files that the
job names, writes its own files below `job.output`, and returns. `tasks/runner.py` starts it in a child process and
publishes what it left; nothing here imports a stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.manifest import StageName


@dataclass(frozen=True)
class StageContext:
    """What a running stage may ask of its runner.

    Args:
        report_progress: called with done, total and a short text; shown in the terminal and by Prefect.
        stop_requested: true once the process was asked to end (SIGTERM); a long stage then saves its work and raises
            `StageError("stage.interrupted", ...)`.
    """

    report_progress: Callable[[int, int, str], None]
    stop_requested: Callable[[], bool]


@dataclass(frozen=True)
class Stage:
    """What a stage depends on; its key is the digest of exactly this.

    Args:
        name: also its module below `tasks` and its folder below the artifact root.
        version: raised by hand when the meaning of the output changes without a change of code here.
        sections: parts of the configuration that it uses.
        takes: earlier stages whose artifacts it reads.
        sources: outside inputs that it reads: host, data, tokenizer, base.
        libraries: packages whose version can change its output.
        on_device: whether the device kind can change its output.
        title: what it does, for people.
        saves_its_work: whether it polls `stop_requested` and leaves a checkpoint.
    """

    name: StageName
    version: int
    sections: tuple[str, ...]
    takes: tuple[StageName, ...]
    sources: tuple[str, ...]
    libraries: tuple[str, ...]
    on_device: bool
    title: str
    saves_its_work: bool = False


_NUMERIC = ("mindspore", "numpy", "safetensors")
_BASE = (*_NUMERIC, "gguf")  # of stages that read the base model

STAGES: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage("validate_env", 1, ("env",), (), ("host",), (), False, "look at the host and choose the device"),
        Stage(
            "tokenize",
            1,
            ("data", "tokenize"),
            (),
            ("data", "tokenizer"),
            ("tokenizers", "transformers", "jinja2", "pyarrow"),
            False,
            "turn records into token shards",
        ),
        Stage(
            "train",
            1,
            ("train",),
            ("tokenize",),
            ("base",),
            (*_BASE, "pyarrow"),
            True,
            "train the LoRA adapter",
            saves_its_work=True,
        ),
        Stage("merge", 1, ("merge",), ("train",), ("base", "tokenizer"), _BASE, True, "add the adapter to the base"),
        Stage("export", 1, ("export",), ("merge",), (), _NUMERIC, True, "compile the model to MindIR"),
        Stage(
            "evaluate",
            1,
            ("evaluate",),
            ("tokenize", "export"),
            ("base", "tokenizer"),
            (*_BASE, "pyarrow", "tokenizers", "transformers", "jinja2"),
            True,
            "compare the model before and after",
        ),
    )
}
