"""The HTML report of a run: one file that needs nothing else, for reading and for sending on.

It shows what `evaluate` measured and what the earlier stages left in their artifacts; those that are not inputs of
`evaluate` are found along the manifests, and why each stage ran in the record of the run that the job names. Nothing
here can change a result: the file is no part of the payload.
"""

import logging
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from schemas.config import DataSource, Section
from schemas.manifest import STAGES, ArtifactRef, Manifest, RunRecord, StageJob, StageName
from schemas.reports import (
    EvalReport,
    ExportReport,
    MergeCertificate,
    Speed,
    TokenizeReport,
    TrainReport,
    TrainTimings,
)
from tasks.environment import find_packages
from tasks.files import write_atomically
from tasks.plots import length_histogram, training_curve

log = logging.getLogger("mindtune.report")

TEMPLATE = "report.html.j2"
NOTICEABLE = 0.01  # of the loss before; a smaller difference is called none
FEW_ROWS = 50  # below it the loss on other rows can well be another one

Document = TypeVar("Document", bound=BaseModel)


@dataclass(frozen=True)
class Origin:
    """An artifact that the result was made from.

    Args:
        ref: what it is.
        folder: where it lies; None when it is not there any more.
        manifest: what it was made from; None likewise.
    """

    ref: ArtifactRef
    folder: Path | None
    manifest: Manifest | None


@dataclass(frozen=True)
class Step:
    """One of the six stages as the report tells it.

    Args:
        stage: the stage.
        key: of its artifact; None when it is not known.
        digest: likewise; None for `evaluate`, which is not published while it writes the report.
        parents: the stages whose artifacts it was made from.
        manifest: of the artifact; None when it is not there any more.
        action: what the run did: ran or reused; None when its record is not at hand, and for `evaluate`.
        reason: why; None likewise.
    """

    stage: StageName
    key: str | None
    digest: str | None
    parents: tuple[str, ...]
    manifest: Manifest | None
    action: str | None
    reason: str | None


def trace(inputs: Mapping[str, str]) -> dict[StageName, Origin]:
    """Every artifact that the inputs were made from, themselves included, in the order of the stages.

    Args:
        inputs: absolute folder of an artifact by its stage, each `<root>/<stage>/<key>`.
    """
    found: dict[StageName, Origin] = {}
    waiting: list[tuple[Path, ArtifactRef]] = []
    for folder in map(Path, inputs.values()):
        manifest = _read(folder / "manifest.json", Manifest)
        if manifest is not None:
            location = f"{manifest.stage}/{manifest.key}"
            ref = ArtifactRef(stage=manifest.stage, key=manifest.key, digest=manifest.digest, location=location)
            waiting.append((folder.parents[1], ref))
    while waiting:
        root, ref = waiting.pop()
        manifest = _read(root / ref.location / "manifest.json", Manifest)
        if manifest is None or manifest.digest != ref.digest:  # gone, or made again with another result
            found.setdefault(ref.stage, Origin(ref, None, None))
            continue
        found[ref.stage] = Origin(ref, root / ref.location, manifest)
        waiting += [(root, earlier) for earlier in manifest.inputs.values()]
    return {stage: found[stage] for stage in STAGES if stage in found}


def write_report(path: Path, job: StageJob, evaluation: EvalReport, speed: Speed) -> None:
    """Write the report of the run that a job of `evaluate` belongs to.

    Args:
        path: the HTML file.
        job: names run, configuration and the artifacts.
        evaluation: what was measured.
        speed: how fast it was.
    """
    origins = trace(job.inputs)

    def left(stage: StageName, name: str, model: type[Document]) -> Document | None:
        folder = Path(job.inputs[stage]) if stage in job.inputs else None
        if folder is None and stage in origins:
            folder = origins[stage].folder
        return None if folder is None else _read(folder / name, model)

    tokenized = left("tokenize", "report.json", TokenizeReport)
    trained = left("train", "report.json", TrainReport)
    html = render(
        job=job,
        evaluation=evaluation,
        speed=speed,
        tokenized=tokenized,
        trained=trained,
        kept_loss=None if trained is None else _kept_loss(trained),
        timings=left("train", "timings.json", TrainTimings),
        certificate=left("merge", "certificate.json", MergeCertificate),
        exported=left("export", "report.json", ExportReport),
        curve=None if trained is None else training_curve(trained, evaluation.validation_is_training),
        histogram=None if tokenized is None else length_histogram(tokenized),
        verdict=verdict(evaluation, trained),
        steps=steps_of(job, origins),
        sources=_sources(job, origins),
        source_names=[] if tokenized is None else _source_names(job, tokenized),
    )
    write_atomically(path, html)


def render(*, job: StageJob, **parts: Any) -> str:
    """The page; `None` for a part that is not at hand, which the page says.

    Args:
        job: the job of `evaluate`.
        parts: the values that the template names.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # answers and data can hold HTML
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": format_size, "duration": format_duration, "number": format_number}
    page: str = environment.get_template(TEMPLATE).render(
        job=job,
        base=base_name(job.config.model.base),
        data=_file_names(job.config.data.train),
        settings=_settings(job),
        made=datetime.now(UTC),
        python=platform.python_version(),
        packages=find_packages(),
        **parts,
    )
    return page


def base_name(location: str) -> str:
    """The base model's name: the last part of its location, without a hub id's revision or a file's suffix."""
    name = location.rstrip("/").rpartition("/")[2]
    if location.startswith(("hf:", "ms:")):
        name = name.partition("@")[0]
    return name.removesuffix(".gguf") or location


def verdict(evaluation: EvalReport, trained: TrainReport | None) -> tuple[str, ...]:
    """What the figures say, in a sentence, and what is to be known before relying on it.

    Args:
        evaluation: what was measured.
        trained: the course of the training; None when it is not at hand.
    """
    before, after = evaluation.loss_before, evaluation.loss_after
    rows = f"{format_number(evaluation.rows)} {'training' if evaluation.validation_is_training else 'held-out'} rows"
    course = f"from {format_number(before)} to {format_number(after)} nats per token"
    change = abs(before - after) / before if before else 0.0
    percent = f"{100 * change:.0f}\N{NO-BREAK SPACE}%"
    if change < NOTICEABLE:
        sentences = [f"On {rows} the loss hardly changed: {course}."]
    elif after < before:
        sentences = [f"On {rows} the loss fell {course}, by {percent}."]
    else:
        sentences = [f"Fine-tuning made the model worse: on {rows} the loss rose {course}, by {percent}."]
    if evaluation.validation_is_training:
        sentences.append(
            "Nothing was held out: these are the rows that the model was trained on, so the figures say how well it "
            "learned them, not how it does on new ones."
        )
        return tuple(sentences)
    if evaluation.rows < FEW_ROWS:
        sentences.append("So few rows give a rough figure only.")
    if trained is not None and trained.best_step < trained.steps:
        kept = "that adapter was kept" if trained.kept_step == trained.best_step else "the last adapter was kept"
        sentences.append(
            f"Held-out loss was lowest at step {format_number(trained.best_step)} of {format_number(trained.steps)}; "
            f"{kept}."
        )
    return tuple(sentences)


def steps_of(job: StageJob, origins: Mapping[StageName, Origin]) -> list[Step]:
    """The six stages of the run, each with its artifact and, from the run's record, why it ran."""
    root = Path(next(iter(job.inputs.values()))).parents[1]
    record = _read(root / "runs" / f"{job.run}.json", RunRecord)
    steps = []
    for stage in STAGES:
        origin = origins.get(stage)
        key, digest = (None, None) if origin is None else (origin.ref.key, origin.ref.digest)
        manifest = None if origin is None else origin.manifest
        outcome = None if record is None else record.outcome(stage)
        if stage == "evaluate":
            step = Step(stage, job.key, None, tuple(job.inputs), None, None, "it wrote this report")
        else:
            if origin is None and outcome is not None and outcome.path is not None:  # no input of any other stage
                key, digest = outcome.key, outcome.digest
                manifest = _read(Path(outcome.path) / "manifest.json", Manifest)
            told = outcome is not None and outcome.key == key and key is not None
            step = Step(
                stage,
                key,
                digest,
                () if manifest is None else tuple(manifest.inputs),
                manifest,
                outcome.action if outcome is not None and told else None,
                outcome.reason if outcome is not None and told else None,
            )
        steps.append(step)
    return steps


def _sources(job: StageJob, origins: Mapping[StageName, Origin]) -> dict[str, str]:
    """Digests of the outside inputs (data, tokenizer, base) of all stages, by name."""
    found = dict(job.sources)
    for origin in origins.values():
        if origin.manifest is not None:
            found |= origin.manifest.key_document.get("sources", {})
    return dict(sorted(found.items()))


def _file_names(sources: Iterable[str | DataSource]) -> list[str]:
    return [Path(source if isinstance(source, str) else source.path).name for source in sources]


def _source_names(job: StageJob, tokenized: TokenizeReport) -> list[str]:
    """What the files that were read are called: their names, or numbers where folders were spelled out."""
    names = _file_names((*job.config.data.train, *job.config.data.validation))
    count = len(tokenized.sources)
    return names if len(names) == count else [f"file {number}" for number in range(1, count + 1)]


def _settings(job: StageJob) -> dict[str, list[tuple[str, Any, bool]]]:
    """Every setting by section: its name, its value, and whether it is the default."""
    config = job.config

    def rows(section: Section, prefix: str = "") -> list[tuple[str, Any, bool]]:
        found = []
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, Section):
                found += rows(value, f"{prefix}{name}.")
            else:
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                plain = section.model_dump(mode="json", include={name})[name]
                found.append((prefix + name, plain, not field.is_required() and value == default))
        return found

    parts = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: rows(part) for name, part in parts.items() if isinstance(part, Section)}


def _kept_loss(report: TrainReport) -> float:
    """Validation loss of the adapter that was kept; the last one where it was not validated at just that step."""
    at_step = {point.step: point.loss for point in report.validation}
    return at_step.get(report.kept_step, report.validation[-1].loss)


def format_number(value: float, digits: int = 3) -> str:
    """A number with so many digits after the point; a tiny or huge one in powers of ten; a count with separators."""
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and not 10**-digits <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{digits}f}"


def format_size(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _read(path: Path, model: type[Document]) -> Document | None:
    """A document, or None with a warning where it is not there or not of this version."""
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("the report goes without %s: %s", path, str(error).splitlines()[0])
        return None
