"""Random conversations through every template and three real tokenizers.

A usual run takes the same few each time. 2,000 new ones for each template and tokenizer:
MINDTUNE_EXAMPLES=2000 pytest tests/tasks/data/test_any_record.py
"""

import base64
import itertools
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from schemas.config import TemplateName, TokenizeConfig
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.chat_template import CHANGES_TEXT, open_template
from tasks.data.encoding import Encoder
from tasks.data.masks import OUTPUT_CHANGED, QUESTION_CHANGED, RecordRows, make_rows
from tasks.data.records import Record, Turn
from tasks.data.templates import TEMPLATES, Template

EXAMPLES = int(os.environ.get("MINDTUNE_EXAMPLES", "40"))  # of each template with each tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

AWKWARD = (
    "### 输出\n",
    "### Response:",
    "\nA:",
    "Q: ",
    "[/INST]",
    "<<SYS>>\n",
    "</s>",
    "<s>",
    "<unk>",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<0x0A>",
    "{output}",
    "{0} %s {{",
    "{{ eos_token }}",
    "{% raise %}",
    "{#",
    " ",
    "  ",
    "\t",
    "\n\n",
    "\r\n",
    "\0",
    "\ufeff",
    "\u3000",
    "\u2003",
    "\ufdd00\ufdd1",
    "\ufdd2\ufdd30\ufdd4",
    "e\u0301",
    "\U0001f468\u200d\U0001f469",
    "你好",
)
UNWRITABLE = "a\u2581b", "\U0010fffe2\U0010ffff"  # what a tokenizer takes for a blank, or for a control token
ORDINARY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\U0010fffe"), max_size=20)
PIECES = st.integers(0, 60).flatmap(
    lambda n: st.sampled_from(UNWRITABLE) if n == 60 else ORDINARY if n < 30 else st.sampled_from(AWKWARD)
)
TEXTS = st.lists(PIECES, min_size=1, max_size=5).map("".join)
ANSWERS = TEXTS.filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn, takes_system: bool) -> tuple[Turn, ...]:
    if draw(st.integers(0, 9)) == 0:
        return (Turn("assistant", draw(ANSWERS)),)
    turns = [Turn("system", draw(ANSWERS))] if takes_system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        question_input = draw(st.just("") | TEXTS)
        turns += [Turn("user", draw(ANSWERS), question_input), Turn("assistant", draw(ANSWERS))]
    return tuple(turns)


@dataclass
class Run:
    """A tokenizer, as the code has it and as any other program would load it, and what became of the records."""

    encoder: Encoder
    reference: Tokenizer
    kept: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def llama2_folder(shared_data: Path, folder: Path) -> Path:
    (folder / "tokenizer.model").write_bytes((shared_data / "tokenizers" / "llama2" / "tokenizer.model").read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    return folder


def qwen_folder(shared_data: Path, folder: Path) -> Path:
    """A byte-level BPE from ranks alone: each token is the merge of the two that merging up to its rank leaves."""
    ranks = {}
    for line in (shared_data / "tokenizers" / "qwen" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letter = bytes_to_unicode()  # how a byte is written in tokenizer.json

    def halves(token: bytes) -> list[bytes]:
        parts = [token[k : k + 1] for k in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            k = pairs.index(min(pairs))
            parts[k : k + 2] = [parts[k] + parts[k + 1]]
        return parts

    def spelled(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = [tuple(map(spelled, halves(token))) for token in ranks if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["llama2", "qwen", "minimind"])
def run(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama2":
        llama2_folder(shared_data, folder)
    elif request.param == "qwen":
        qwen_folder(shared_data, folder)
    else:
        folder = shared_data / "models" / "zh-tiny-llama"
    encoder = Encoder(folder)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = AutoTokenizer if request.param == "llama2" else PreTrainedTokenizerFast
    return Run(encoder, loader.from_pretrained(str(folder)).backend_tokenizer)


@pytest.fixture(scope="module")
def templates(run: Run) -> dict[str, Template]:
    return {name: open_template(name, run.encoder) for name in (*TEMPLATES, "tokenizer")}


def check(run: Run, template: Template, turns: tuple[Turn, ...], train_on: str) -> None:
    """One conversation: exactly its answers and their end tokens are trained, or it is rejected for a good reason."""
    config = TokenizeConfig(template=template.name, max_length=131072, train_on=train_on)
    made = make_rows([Record("data.json", 0, None, turns)], template, run.encoder, config)[0][0]
    if isinstance(made, Rejected):
        run.reasons[made.reason] += 1
        texts = "".join(turn.text + turn.input for turn in turns)
        if made.reason in (QUESTION_CHANGED, OUTPUT_CHANGED):
            # a blank as SentencePiece writes it, and the inner name of a control token, are what can't be written
            assert "\U0010fffe" in texts or (run.encoder.bos_id is not None and "\u2581" in texts), ascii(texts)
        elif made.reason == CHANGES_TEXT:
            assert "\n" in texts or "think>" in texts, ascii(texts)  # minimind's own template
        else:
            raise AssertionError(made.reason)
        return
    run.kept += 1
    assert isinstance(made, RecordRows)
    (row,) = made.rows
    (end,) = run.encoder.end_ids(template)
    answers = [turn.text for turn in turns if turn.role == "assistant"]
    wanted = answers[-1:] if train_on == "last" else answers
    trained = [label for label in row.labels if label != IGNORE_LABEL]
    assert trained == [i for i, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORE_LABEL]
    ends = [-1, *(k for k, label in enumerate(trained) if label == end)]
    assert len(ends) == len(wanted) + 1
    assert ends[-1] == len(trained) - 1
    for (before, after), answer in zip(itertools.pairwise(ends), wanted, strict=True):
        found = run.reference.decode(trained[before + 1 : after], skip_special_tokens=False)
        if template.name == "tokenizer" and len(turns) > 1:
            assert found in (answer, answer.lstrip("\n"))
        else:
            assert found == answer
    if run.encoder.bos_id is not None:
        starts = 1 + (template.name == "llama2") * (max(1, len([t for t in turns if t.role == "user"])) - 1)
        assert row.input_ids[0] == run.encoder.bos_id
        assert row.input_ids.count(run.encoder.bos_id) == starts
    if len(turns) > 1:
        prompt = row.input_ids[: len(row.input_ids) - ends[-1] + ends[-2]]
        assert prompt == run.encoder.prompt_ids(turns[:-1], template)


@pytest.mark.parametrize("name", [*TEMPLATES, "tokenizer"])
def test_exactly_the_answers_and_their_end_tokens_are_trained(
    run: Run, templates: dict[str, Template], name: TemplateName
) -> None:
    run.kept, run.reasons = 0, Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize="MINDTUNE_EXAMPLES" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(turns=conversations(name != "plain"), train_on=st.sampled_from(["all", "last"]))
    def search(turns: tuple[Turn, ...], train_on: str) -> None:
        check(run, templates[name], turns, train_on)

    search()
    assert run.kept > 2 * run.reasons.total()


@pytest.fixture(scope="module")
def shared_encoder(shared_data: Path) -> Encoder:
    return Encoder(shared_data / "models" / "zh-tiny-llama")


def test_long_conversations_keep_their_answers_whole_whatever_is_done_with_them(shared_encoder: Encoder) -> None:
    template = TEMPLATES["chatml"]
    seen: Counter[str] = Counter()

    @settings(
        max_examples=10 * EXAMPLES, deadline=None, database=None, derandomize="MINDTUNE_EXAMPLES" not in os.environ
    )
    @given(
        turns=conversations(True),
        train_on=st.sampled_from(["all", "last"]),
        too_long=st.sampled_from(["cut_prompt", "split"]),
        longest=st.integers(8, 150),
    )
    def search(turns: tuple[Turn, ...], train_on: str, too_long: str, longest: int) -> None:
        config = TokenizeConfig(template="chatml", max_length=longest, train_on=train_on, too_long=too_long)
        made = make_rows([Record("data.json", 0, None, turns)], template, shared_encoder, config)[0][0]
        if isinstance(made, Rejected):
            return
        seen.update(cut=made.is_cut, split=made.is_split)
        assert all(len(row.input_ids) <= longest for row in made.rows)
        trained = [label for row in made.rows for label in row.labels if label != IGNORE_LABEL]
        ends = [-1, *(k for k, label in enumerate(trained) if label == shared_encoder.eos_id)]
        found = [shared_encoder.decode(trained[a + 1 : b]) for a, b in itertools.pairwise(ends)]
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        assert found == (answers[-1:] if train_on == "last" else answers)
        if turns[0].role == "system":
            start = shared_encoder.prompt_ids([turns[0], Turn("user", "")], template)
            system = start[: start.index(shared_encoder.eos_id)]
            assert all(row.input_ids[: len(system)] == system for row in made.rows)
        if too_long == "cut_prompt":
            assert len(made.rows) == 1

    search()
    assert min(seen["cut"], seen["split"]) > EXAMPLES / 10
