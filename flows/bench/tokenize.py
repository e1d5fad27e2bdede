"""`mindtune bench tokenize`: the stage `tokenize` beside `datasets.load_dataset(...).map(...)`, and what packing saves.

Both sides read the same files and make the same ids and labels (checked: one SHA-256 over all rows), with as many
worker processes, as whole processes from start to end.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flows.bench.measure import Measured, data_folder, measure, peer_command, run_stages
from schemas.config import LlmConfig
from schemas.errors import StageError

WORKERS = 2
MAX_LENGTH = 512
BATCH = 8  # rows of the padded micro-batches that packing is compared with
COPIES = (1, 20)


def run(copies: tuple[int, ...] = COPIES) -> dict[str, Any]:
    """Measure both sides on alpaca_zh_part00 and on copies of it.

    Args:
        copies: how often the file is taken, one measurement each.

    Returns:
        ratio_records_per_second and ratio_peak_memory (the worst of all sizes), packing_real_token_share, and the
        single measurements under `runs`.

    Raises:
        HostError: no peers (bench.no_peers) or no test data (bench.no_data).
        StageError: a side failed, or the two did not make the same rows (bench.differs).
    """
    data = data_folder()
    source = data / "instruction" / "alpaca_zh_part00.json"
    records = len(json.loads(source.read_text(encoding="utf-8-sig")))
    runs = []
    with tempfile.TemporaryDirectory(prefix="mindtune-bench-") as name:
        for count in copies:
            folder = Path(name) / str(count)
            folder.mkdir()
            files = [folder / f"{place:02d}.json" for place in range(count)]
            for file in files:
                shutil.copyfile(source, file)
            runs.append({"records": count * records, **_compare(files, data / "tokenizers" / "minimind", folder)})
            shutil.rmtree(folder)
        shares = _shares(source, data / "tokenizers" / "minimind", Path(name))
    return {
        "ratio_records_per_second": min(run["ratio_records_per_second"] for run in runs),
        "ratio_peak_memory": max(run["ratio_peak_memory"] for run in runs),
        "packing_real_token_share": shares["packed"],
        "runs": runs,
        "real_token_shares": shares,
    }


def _config(files: list[Path], tokenizer: Path, **tokenize: Any) -> LlmConfig:
    return LlmConfig.model_validate(
        {
            "model": {"base": str(tokenizer), "tokenizer": str(tokenizer)},
            "data": {"train": [str(file) for file in files], "validation_share": 0},
            "tokenize": {"template": "chatml", "max_length": MAX_LENGTH, "workers": WORKERS, **tokenize},
        }
    )


def _ours(config: LlmConfig, folder: Path) -> tuple[Measured, Path]:
    """The stage, measured; and the folder of its training rows."""
    measured, (tokens,) = run_stages(config, folder, ["tokenize"])
    return measured, tokens / "train"


def _compare(files: list[Path], tokenizer: Path, folder: Path) -> dict[str, Any]:
    job = {
        "files": files,
        "tokenizer": tokenizer,
        "template": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        "end_token": "<|im_end|>",
        "max_length": MAX_LENGTH,
        "cache": folder / "cache",
        "processes": WORKERS,
    }
    home = {"HF_HOME": str(folder / "home"), "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    ours, rows = _ours(_config(files, tokenizer), folder)
    peer = measure(peer_command("peer_tokenize.py", **job, digest=False), folder / "peer.log", home)
    theirs = json.loads(
        measure(peer_command("peer_tokenize.py", **job, digest=True), folder / "digest.log", home).output
    )
    found = _digest(rows)
    if found != theirs:
        raise StageError("bench.differs", ours=found, peer=theirs)
    return {
        "rows": found["rows"],
        "ratio_records_per_second": round(peer.seconds / ours.seconds, 3),
        "ratio_peak_memory": round(ours.peak_memory_bytes / peer.peak_memory_bytes, 3),
        "mindtune": ours.document(),
        "datasets": peer.document(),
    }


def _digest(folder: Path) -> dict[str, Any]:
    from tasks.data.shards import TokenRows

    rows, found = TokenRows(folder), hashlib.sha256()
    for index in range(len(rows)):
        row = rows.row(index)
        found.update(row.input_ids.astype(np.int32).tobytes() + row.labels.astype(np.int32).tobytes())
    return {"rows": len(rows), "digest": found.hexdigest()}


def _shares(source: Path, tokenizer: Path, folder: Path) -> dict[str, float]:
    """Shares of tokens that are no padding: packed, all padded to MAX_LENGTH, each batch padded to its longest row."""
    from tasks.data.shards import TokenRows

    shares = {}
    for packing in ("none", "pack"):
        place = folder / packing
        place.mkdir()
        _, rows = _ours(_config([source], tokenizer, packing=packing), place)
        lengths = TokenRows(rows).lengths()
        shares[packing] = float(lengths.sum()) / (len(lengths) * MAX_LENGTH)
        if packing == "none":
            whole = lengths[: len(lengths) // BATCH * BATCH]
            order = np.random.default_rng(0).permutation(len(whole))  # training shuffles
            batches = whole[order].reshape(-1, BATCH)
            dynamic = float(whole.sum()) / float(batches.max(axis=1).sum() * BATCH)
    return {
        "packed": round(shares["pack"], 4),
        f"padded_to_{MAX_LENGTH}": round(shares["none"], 4),
        f"padded_to_the_longest_of_{BATCH}": round(dynamic, 4),
    }
