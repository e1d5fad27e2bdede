"""`mindtune bench loading`: how fast batches come from packed shards, beside the training step that takes them."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from flows.bench.measure import data_folder, run_stages
from schemas.config import LlmConfig
from schemas.reports import TokenizeReport

MAX_LENGTH = 512
BATCH = 8
STEPS = 12  # of training; the median step counts


def run() -> dict[str, Any]:
    """Train a small model for some steps, then read the batches of a whole epoch without training.

    The model is the small Chinese Llama of the test data (1.7 million parameters): larger ones need fewer batches.

    Returns:
        ratio_tokens_per_second (loading / training), share_of_a_step (loading's time in a training step's), and the
        single figures.

    Raises:
        HostError: no test data (bench.no_data).
        StageError: a stage failed.
    """
    from tasks.batches import RowOrder, collate
    from tasks.data.shards import TokenRows

    data = data_folder()
    config = LlmConfig.model_validate(
        {
            "model": {"base": str(data / "models" / "zh-tiny-llama")},
            "data": {"train": [str(data / "instruction" / "alpaca_zh_part00.json")], "validation_share": 0.005},
            "tokenize": {"template": "chatml", "max_length": MAX_LENGTH, "packing": "pack"},
            "train": {"max_steps": STEPS, "batch_size": BATCH, "evaluate_every_steps": STEPS},
        }
    )
    with tempfile.TemporaryDirectory(prefix="mindtune-bench-") as name:
        _, (_, tokens, adapter) = run_stages(config, Path(name), ["validate_env", "tokenize", "train"])
        step_seconds = json.loads((adapter / "timings.json").read_text(encoding="utf-8"))["median_step_seconds"]
        report = TokenizeReport.model_validate_json((tokens / "report.json").read_text(encoding="utf-8"))
        began = time.perf_counter()
        rows = TokenRows(tokens / "train")
        order = RowOrder(rows.lengths(), report.padded_lengths, BATCH, 1, 0)
        seen = 0
        for step in range(1, order.steps_per_epoch + 1):
            for batch in order.micro_batches(step):
                seen += collate(rows, batch.rows, BATCH, batch.length).input_ids.size
        seconds = time.perf_counter() - began
    loading_speed, training_speed = seen / seconds, BATCH * MAX_LENGTH / step_seconds
    return {
        "ratio_tokens_per_second": round(loading_speed / training_speed, 1),
        "share_of_a_step": round(seconds / order.steps_per_epoch / step_seconds, 5),
        "loading_tokens_per_second": round(loading_speed),
        "training_tokens_per_second": round(training_speed),
        "training_step_seconds": round(step_seconds, 4),
        "batches": order.steps_per_epoch,
    }
