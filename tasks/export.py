"""Stage `export`: the merged model as a MindIR with a KV cache, proved against the plain forward pass.

    model.mindir                    graph and weights; above 1 GiB model_graph.mindir and the folder model_variables
    mindtune.json                   MindirSpec: what a program that runs the graph has to know
    config.json, tokenizer files    those of the merged model
    report.json                     ExportReport: parity at several lengths

MindIR files differ between processes although they say the same (MindSpore 2.7.0: three exports, three digests), and
the last digits of the parity are the machine's. The digest of the artifact is therefore over the merged weights, the
graph's inputs and sizes, a greedy answer of the MindIR, and the other files.
"""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.config import ExportConfig
from schemas.errors import InputError, StageError
from schemas.manifest import StageJob, StageResult
from schemas.reports import ExportReport, MindirSpec, ParityPoint
from tasks.files import digest_of, sha256_file
from tasks.models.generation import SPEC_FILE, Generator
from tasks.models.parity import compared_positions, measure_parity
from tasks.models.saving import weights_digest
from tasks.models.spec import DecoderSpec, read_spec
from tasks.stages import StageContext
from tasks.tokenizer_files import copy_tokenizer

if TYPE_CHECKING:
    from tasks.models.decoder import Decoder

log = logging.getLogger("mindtune.export")

REPORT = "report.json"
PROBE_PROMPT = 8  # tokens
PROBE_ANSWER = 8  # tokens; with the prompt within the smallest cache


def run(job: StageJob, context: StageContext) -> StageResult:
    """Compile the merged model to MindIR, load it anew and compare it with the plain model.

    Raises:
        InputError: the merged model has fewer positions than the cache; a file is missing or damaged.
        StageError: MindIR and plain model differ by more than `export.tolerance`.
    """
    from tasks.models.cached import INPUT_SHAPES
    from tasks.models.device import use_device
    from tasks.models.forward import logits_at, probe_ids
    from tasks.models.loading import load_decoder

    merged, output, settings = Path(job.inputs["merge"]), Path(job.output), job.config.export
    spec = read_spec(merged)
    if settings.cache_length > spec.positions:
        field = "export.cache_length"
        raise InputError(
            "model.too_short", stage="export", field=field, value=settings.cache_length, positions=spec.positions
        )
    use_device(job.device)
    context.report_progress(0, 4, "computing the plain forward pass")
    decoder = load_decoder(merged)
    ids = probe_ids(spec.vocabulary, 1, max(*settings.parity_lengths, PROBE_PROMPT))
    positions = sorted({place for length in settings.parity_lengths for place in compared_positions(length)})
    wanted = dict(zip(positions, logits_at(decoder, ids, positions)[0], strict=True))

    context.report_progress(1, 4, "exporting")
    mindir_files = write_mindir(decoder, spec, output, settings)
    del decoder  # two models need not fit into memory
    others = (SPEC_FILE, "config.json", *copy_tokenizer(merged, output))
    shutil.copyfile(merged / "config.json", output / "config.json")

    context.report_progress(2, 4, "loading the MindIR")
    generator = Generator.from_mindir(output)
    context.report_progress(3, 4, "comparing")
    text = ids[0].tolist()
    report = ExportReport(
        cache_length=settings.cache_length,
        prefill_chunk=settings.prefill_chunk,
        vocabulary=spec.vocabulary,
        graph_inputs=INPUT_SHAPES,
        parity=measure_parity(generator, text, settings.parity_lengths, wanted),
        tolerance=settings.tolerance,
    )
    worst = check_parity(report.parity, settings.tolerance)
    (output / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    answer = generator.generate(text[:PROBE_PROMPT], PROBE_ANSWER)
    context.report_progress(4, 4, f"largest difference {worst:.1e}")
    log.info("MindIR and plain model differ by %.1e at most, at %s tokens", worst, settings.parity_lengths)
    graph = {
        "inputs": {name: list(shape) for name, shape in INPUT_SHAPES.items()},
        "cache_length": settings.cache_length,
        "prefill_chunk": settings.prefill_chunk,
        "model": dataclasses.asdict(spec),
    }
    return StageResult(
        metrics={
            "max_relative_difference": worst,
            "mindir_bytes": sum((output / name).stat().st_size for name in mindir_files),
        },
        payload={
            "weights": weights_digest(merged),
            "graph": digest_of(graph),
            "probe": digest_of(list(answer.ids)),
            **{name: sha256_file(output / name) for name in others},
        },
        volatile=(*mindir_files, REPORT),
    )


def write_mindir(decoder: "Decoder", spec: DecoderSpec, output: Path, settings: ExportConfig) -> tuple[str, ...]:
    """Export a decoder with an empty cache, and say in `mindtune.json` how to run it; gives the MindIR's files."""
    import mindspore

    from tasks.models.cached import CachedDecoder, input_forms

    cell = CachedDecoder(decoder, settings.cache_length, settings.prefill_chunk)
    mindspore.export(cell, *input_forms(), file_name=str(output / "model"), file_format="MINDIR")
    graph_file, *_ = sorted(path.name for path in output.glob("*.mindir"))
    parts = sorted(path for path in output.glob("model*") if path.is_dir())
    files = (graph_file, *(str(path.relative_to(output)) for part in parts for path in sorted(part.iterdir())))
    about = MindirSpec(
        graph_file=graph_file,
        cache_length=settings.cache_length,
        prefill_chunk=settings.prefill_chunk,
        vocabulary=spec.vocabulary,
    )
    (output / SPEC_FILE).write_text(about.model_dump_json(indent=2) + "\n", encoding="utf-8")
    # MindSpore makes its files readable for their owner alone; an artifact is for all whom the umask lets in.
    for name in files:
        (output / name).chmod((output / SPEC_FILE).stat().st_mode)
    for part in parts:
        part.chmod(output.stat().st_mode)
    return files


def check_parity(points: tuple[ParityPoint, ...], tolerance: float) -> float:
    """The largest relative difference of all lengths.

    Raises:
        StageError: it is larger than the tolerance, or not a number.
    """
    worst = 0.0
    for point in points:
        for difference in (point.max_relative_difference, point.decode_relative_difference):
            if not difference <= tolerance:
                raise StageError(
                    "export.parity",
                    stage="export",
                    difference=f"{difference:.3g}",
                    length=point.length,
                    tolerance=tolerance,
                )
            worst = max(worst, difference)
    return worst
