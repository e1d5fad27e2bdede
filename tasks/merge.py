"""Stage `merge`: base model + adapter = one Hugging Face folder, with a certificate.

    config.json, generation_config.json, tokenizer files   those of the base model (or of model.tokenizer), or what a
                                                           GGUF file amounts to; they stop at the token that the adapter
                                                           was trained to end with, too
    model.safetensors                                      or shards and model.safetensors.index.json
    certificate.json                                       MergeCertificate: merged against attached, on probe prompts

The certificate is about what was written: the folder is loaded anew and held against the base model with the adapter
attached. Its last digits are not a function of the key.
"""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from schemas.config import MergeConfig
from schemas.errors import InputError, StageError
from schemas.manifest import StageJob, StageResult
from schemas.reports import MergeCertificate
from tasks.files import digest_of, sha256_file
from tasks.locations import base_path, tokenizer_path
from tasks.models.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from tasks.models.merging import base_tensors, check_adapter, merged_tensors
from tasks.models.parity import relative_difference
from tasks.models.saving import write_weights
from tasks.models.spec import check_tensors, expected_shapes, read_config, read_spec
from tasks.stages import StageContext
from tasks.tokenizer_files import copy_tokenizer

if TYPE_CHECKING:
    from tasks.models.decoder import Decoder

log = logging.getLogger("mindtune.merge")

Device = Literal["CPU", "Ascend"]

CERTIFICATE = "certificate.json"
PROBES = 4
PROBE_TOKENS = 32  # a causal model: the logits after each token are those of the prompt that ends there


def run(job: StageJob, context: StageContext) -> StageResult:
    """Merge the trained adapter into the base model and prove that nothing was lost.

    Raises:
        InputError: the adapter belongs to another base model, or does not fit it; a file is missing or damaged.
        StageError: the adapter is not finite, the merged weights are beyond the range of `merge.dtype`, or the merged
            model differs from the base model with the adapter attached by more than `merge.tolerance`.
    """
    base, output, settings = base_path(job.config.model), Path(job.output), job.config.merge
    adapter_folder = Path(job.inputs["train"])
    adapter = read_adapter(adapter_folder)
    planned = job.sources["base"]
    if adapter.base_digest is not None and adapter.base_digest != planned:
        raise InputError("merge.wrong_base", stage="merge", wanted=adapter.base_digest, path=base, found=planned)

    context.report_progress(0, 3, "adding the adapter")
    digest = write_merged(base, adapter, adapter_folder, output, settings)
    copy_tokenizer(tokenizer_path(job.config.model), output)
    context.report_progress(1, 3, "computing with the adapter attached")
    difference, same = compare(base, adapter, output, job.device)
    context.report_progress(3, 3, f"largest difference {difference:.1e}")
    if not difference <= settings.limit:  # NaN is no certificate
        raise StageError("merge.certificate", stage="merge", difference=f"{difference:.3g}", tolerance=settings.limit)
    certificate = MergeCertificate(
        base_digest=planned,
        adapter_digest=digest_of({name: sha256_file(adapter_folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}),
        merged_digest=digest,
        merged_layers=dict.fromkeys(adapter.layers, adapter.scale),
        dtype=settings.dtype,
        probes=PROBES,
        max_relative_difference=difference,
        same_greedy_token_share=same,
        tolerance=settings.limit,
    )
    (output / CERTIFICATE).write_text(certificate.model_dump_json(indent=2) + "\n", encoding="utf-8")
    log.info("merged %d layers at scale %g; largest difference %.1e", len(adapter.layers), adapter.scale, difference)
    return StageResult(
        metrics={
            "merged_layers": len(adapter.layers),
            "scale": adapter.scale,
            "max_relative_difference": difference,
            "same_greedy_token_share": same,
        },
        volatile=(CERTIFICATE,),
    )


def write_merged(base: Path, adapter: Adapter, adapter_folder: Path, output: Path, settings: MergeConfig) -> str:
    """Write weights and configuration of the merged model into an existing folder; gives the weights' digest.

    Raises:
        InputError: the adapter or the base model is unusable.
        StageError: the adapter, or a merged weight in its type, is not finite.
    """
    spec = read_spec(base)
    check_tensors(base, spec)
    check_adapter(adapter, spec, adapter_folder)
    shapes = expected_shapes(spec)
    digest = write_weights(
        output,
        shapes,
        merged_tensors(base_tensors(base, shapes), adapter, settings.dtype),
        dtype=settings.dtype,
        max_shard_bytes=settings.max_shard_gib * 2**30,
    )
    config = read_config(base)
    names = [name for name in ("torch_dtype", "dtype") if name in config] or ["torch_dtype"]  # old name, new name
    _write_config(output / "config.json", config | dict.fromkeys(names, settings.dtype), adapter)
    if (base / "generation_config.json").is_file():
        generation = json.loads((base / "generation_config.json").read_text(encoding="utf-8-sig"))
        _write_config(output / "generation_config.json", generation, adapter)
    return digest


def _write_config(path: Path, config: dict[str, Any], adapter: Adapter) -> None:
    """Write a configuration that stops at the token that the adapter was trained to end with, too."""
    ends = config.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if adapter.end_token is not None and adapter.end_token not in known:
        config |= {"eos_token_id": [adapter.end_token, *known] if known else adapter.end_token}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(base: Path, adapter: Adapter, merged: Path, device: Device) -> tuple[float, float]:
    """Largest relative difference of the logits, and the share of equal greedy tokens, over all probe prompts.

    Args:
        base: folder or GGUF file of the base model, which the adapter is attached to.
        adapter: the adapter.
        merged: folder of the merged model.
        device: CPU or Ascend.
    """
    from tasks.models.device import use_device
    from tasks.models.forward import logits_at, probe_ids
    from tasks.models.loading import load_decoder
    from tasks.models.lora import attach_adapter

    use_device(device)
    spec = read_spec(base)
    ids = probe_ids(spec.vocabulary, PROBES, min(PROBE_TOKENS, spec.positions))

    def logits(decoder: "Decoder") -> NDArray[np.float32]:
        return logits_at(decoder, ids, range(ids.shape[1]))

    decoder = load_decoder(base)
    attach_adapter(decoder, adapter)
    wanted = logits(decoder)
    del decoder  # two models need not fit into memory
    found = logits(load_decoder(merged))
    return relative_difference(found, wanted), float((found.argmax(-1) == wanted.argmax(-1)).mean())
