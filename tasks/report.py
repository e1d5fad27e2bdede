"""The HTML report of a run: one file that needs nothing else, for reading and for sending on.

It shows what `evaluate` measured and what the earlier stages left in their artifacts; those that are not inputs of
`evaluate` are found along the manifests. Nothing here can change a result: the file is no part of the payload.
"""

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from schemas.manifest import STAGES, ArtifactRef, Manifest, StageJob, StageName
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
from tasks.plots import length_histogram, loss_curve

log = logging.getLogger("mindtune.report")

TEMPLATE = "report.html.j2"

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
        curve=None if trained is None else loss_curve(trained),
        histogram=None if tokenized is None else length_histogram(tokenized),
        origins=origins,
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
        base=Path(job.config.model.base).name,
        config=yaml.safe_dump(job.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        made=datetime.now(UTC),
        python=platform.python_version(),
        packages=find_packages(),
        **parts,
    )
    return page


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
