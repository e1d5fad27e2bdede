"""The peer of `mindtune bench tokenize`: Hugging Face `datasets` and `transformers`, as their users write it.

    python peer_tokenize.py '{"files": [...], "tokenizer": folder, "template": [before, after], "max_length": N, ...}'

Runs in .venv-peers and imports nothing of mindtune. `load_dataset("json")`, then one batched `map` on `processes`
processes that gives the ids and labels; what has no output or is too long is left out. With `digest` it opens what the
map left in its cache and prints the number of rows and the SHA-256 of all ids and labels.
"""

import hashlib
import json
import sys
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast

IGNORE = -100


def tokenized(job: dict[str, Any]) -> Dataset:
    """All records as rows of input_ids and labels."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["tokenizer"])
    before, after = job["template"]
    end = tokenizer.convert_tokens_to_ids(job["end_token"])

    def rows(batch: dict[str, Any]) -> dict[str, Any]:
        prompts, answers = [], []
        for instruction, question, output in zip(batch["instruction"], batch["input"], batch["output"], strict=True):
            if not output or not output.strip():
                continue
            text = instruction + "\n" + question if instruction and question else instruction or question
            prompts.append(before + text + after)
            answers.append(output)
        result: dict[str, Any] = {"input_ids": [], "labels": []}
        if not prompts:
            return result
        asked = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        answered = tokenizer(answers, add_special_tokens=False)["input_ids"]
        for prompt, answer in zip(asked, answered, strict=True):
            if len(prompt) + len(answer) + 1 <= job["max_length"]:
                result["input_ids"].append(prompt + answer + [end])
                result["labels"].append([IGNORE] * len(prompt) + answer + [end])
        return result

    data = load_dataset("json", data_files=job["files"], split="train", cache_dir=job["cache"])
    return data.map(rows, batched=True, num_proc=job["processes"], remove_columns=data.column_names)


def digest(data: Dataset) -> dict[str, Any]:
    """Number of rows, and the SHA-256 over the int32 ids and labels of all rows in order."""
    found = hashlib.sha256()
    for batch in data.with_format("numpy").iter(1000):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            found.update(np.asarray(ids, np.int32).tobytes() + np.asarray(labels, np.int32).tobytes())
    return {"rows": len(data), "digest": found.hexdigest()}


if __name__ == "__main__":
    asked_for = json.loads(sys.argv[1])
    made = tokenized(asked_for)
    if asked_for["digest"]:
        sys.stdout.write(json.dumps(digest(made)))
