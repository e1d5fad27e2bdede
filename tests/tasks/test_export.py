"""The stage `export`: the MindIR in this process and in a fresh one, its parity, its digest, and what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from schemas.config import LlmConfig
from schemas.errors import InputError, StageError
from schemas.manifest import StageJob, StageResult
from schemas.reports import ExportReport, MindirSpec, ParityPoint
from tasks import export
from tasks.stages import StageContext

PROJECT = Path(__file__).parents[2]
PROMPT = [1, 403, 407, 261, 378]  # "Once upon a time"
SETTINGS = {"cache_length": 300, "prefill_chunk": 64, "parity_lengths": (1, 5, 64, 100, 300)}
SMALL_SETTINGS = {"cache_length": 72, "prefill_chunk": 16, "parity_lengths": (1, 16, 40)}

# What a fresh process finds in an exported folder, and what the export gives there: JSON on its last line.
FRESH = """
import json, sys
from pathlib import Path
from schemas.manifest import StageJob
from tasks.export import run
from tasks.models.device import use_device
from tasks.models.generation import Generator
from tasks.stages import StageContext
use_device("CPU")
folder, job, prompt = sys.argv[1:]
generator = Generator.from_mindir(Path(folder))
logits = generator.logits(json.loads(prompt)).tolist()
story = generator.generate([1], 256).ids
result = run(StageJob.model_validate_json(job), StageContext(lambda *_: None, lambda: False))
print(json.dumps({"logits": logits, "story": story, "payload": result.payload}))
"""


def make_job(model: Path, output: Path, **settings) -> StageJob:
    output.mkdir(parents=True)
    config = {"model": {"base": "unused"}, "data": {"train": ["unused.json"]}, "export": settings}
    return StageJob(
        stage="export",
        key="0" * 64,
        run="test",
        config=LlmConfig.model_validate(config),
        inputs={"merge": str(model)},
        sources={},
        output=str(output),
        work=str(output),
        device="CPU",
    )


def run(job: StageJob, progress=None) -> StageResult:
    reports = [] if progress is None else progress
    return export.run(job, StageContext(lambda *report: reports.append(report), lambda: False))


class Exported:
    """stories260K after the stage: its folder, result and reports of progress."""

    def __init__(self, model, folder):
        self.progress = []
        self.result = run(make_job(model, folder, **SETTINGS), self.progress)
        self.folder = folder
        self.report = ExportReport.model_validate_json((folder / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported(stories, tmp_path_factory):
    return Exported(stories, tmp_path_factory.mktemp("export") / "first")


@pytest.fixture(scope="module")
def fresh(exported, stories, tmp_path_factory):
    """The exported folder, moved elsewhere, as a fresh process sees it; and a second export made there."""
    moved = shutil.copytree(exported.folder, tmp_path_factory.mktemp("moved") / "artifact")
    job = make_job(stories, tmp_path_factory.mktemp("again") / "second", **SETTINGS)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(moved), job.model_dump_json(), json.dumps(PROMPT)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_folder_holds_what_a_program_needs_to_run_the_graph(exported, stories):
    files = {path.name for path in exported.folder.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}
    assert files == {"model.mindir", "mindtune.json", "config.json", "report.json"} | tokenizer
    for name in ("config.json", "tokenizer.json"):
        assert (exported.folder / name).read_bytes() == (stories / name).read_bytes()
    spec = MindirSpec.model_validate_json((exported.folder / "mindtune.json").read_text())
    assert spec == MindirSpec(graph_file="model.mindir", cache_length=300, prefill_chunk=64, vocabulary=512)


def test_all_files_can_be_read_by_whom_the_umask_lets_in(exported):
    modes = {path.name: path.stat().st_mode for path in exported.folder.iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_mindir_and_cell_agree_at_every_length(exported):
    report = exported.report
    assert [point.length for point in report.parity] == [1, 5, 64, 100, 300]
    for point in report.parity:
        assert point.max_relative_difference <= 1e-4
        assert 0 < point.decode_relative_difference <= 1e-4
    assert report.graph_inputs == {"input_ids": (1, None), "positions": (None,)}
    assert (report.cache_length, report.prefill_chunk, report.vocabulary) == (300, 64, 512)
    worst = max(max(point.max_relative_difference, point.decode_relative_difference) for point in report.parity)
    assert exported.result.metrics["max_relative_difference"] == worst
    assert exported.result.metrics["mindir_bytes"] == (exported.folder / "model.mindir").stat().st_size


def test_progress_ends_at_its_total(exported):
    assert [done for done, _, _ in exported.progress] == [0, 1, 2, 3, 4]
    assert exported.progress[-1][1] == 4


def test_a_fresh_process_finds_the_reference_logits(fresh):
    last = np.array(fresh["logits"])[-1]
    best = np.argsort(-last)[:5]
    assert best.tolist() == [432, 383, 322, 353, 323]
    np.testing.assert_allclose(last[best], [17.7994, 14.2813, 9.7097, 9.5873, 9.1342], atol=1e-3)


def test_a_fresh_process_tells_the_known_story_word_for_word(fresh, stories):
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    known = (stories.parent / "stories260K-greedy.txt").read_text(encoding="utf-8")
    assert tokenizer.decode(fresh["story"]) == known.rstrip("\n")


def test_two_processes_give_the_same_digests(exported, fresh):
    assert exported.result.payload == fresh["payload"]
    assert set(exported.result.volatile) == {"model.mindir", "report.json"}
    names = {path.name for path in exported.folder.iterdir()} - set(exported.result.volatile)
    assert set(exported.result.payload) == {"weights", "graph", "probe"} | names


@pytest.fixture(scope="module")
def untied(stories, tmp_path_factory):
    """stories260K with a head of its own that is not its embedding, and with other key weights."""
    folder = shutil.copytree(stories, tmp_path_factory.mktemp("untied") / "model")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 3, axis=0)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_of_its_own_is_exported_and_changes_the_digest_of_weights_graph_and_answer(untied, exported, tmp_path):
    result = run(make_job(untied, tmp_path / "out", **SETTINGS))
    assert result.metrics["max_relative_difference"] <= 1e-4
    for part in ("weights", "graph", "probe"):
        assert result.payload[part] != exported.result.payload[part]
    assert result.payload["tokenizer.json"] == exported.result.payload["tokenizer.json"]


def test_a_graph_with_other_weights_than_the_model_is_not_published(stories, tmp_path, monkeypatch):
    right = export.write_mindir

    def with_an_altered_weight(decoder, *rest):
        weight = decoder.model.layers[3].self_attn.v_proj.weight
        values = weight.asnumpy().copy()
        values[7, 5] += 0.05
        from mindspore import Tensor

        weight.set_data(Tensor(values))
        return right(decoder, *rest)

    monkeypatch.setattr(export, "write_mindir", with_an_altered_weight)
    with pytest.raises(
        StageError, match=r"MindIR and Cell differ by [0-9.e-]+ \(relative\) at 16 tokens, more than export"
    ):
        run(make_job(stories, tmp_path / "out", **SMALL_SETTINGS | {"parity_lengths": (16, 40)}))
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    ("prefill", "decode"), [(2e-4, 0.0), (0.0, 2e-4), (float("nan"), 0.0), (0.0, float("nan")), (float("inf"), 0.0)]
)
def test_a_difference_above_the_tolerance_or_no_number_is_an_error(prefill, decode):
    fine = ParityPoint(length=5, max_relative_difference=9e-5, decode_relative_difference=1e-5)
    wrong = ParityPoint(length=64, max_relative_difference=prefill, decode_relative_difference=decode)
    assert export.check_parity((fine,), 1e-4) == 9e-5
    with pytest.raises(StageError, match=r"at 64 tokens, more than export.tolerance \(0.0001\)"):
        export.check_parity((fine, wrong), 1e-4)


def test_a_cache_longer_than_the_model_is_refused_before_anything_is_made(stories, tmp_path):
    job = make_job(stories, tmp_path / "out", cache_length=513)
    with pytest.raises(InputError, match=r"export.cache_length \(513\) is more than the 512 positions"):
        run(job)
    assert not list((tmp_path / "out").iterdir())


def test_a_cache_as_long_as_the_model_may_reach_over_it_with_padding(exported):
    """300 tokens in chunks of 64: the cache has 320 rows, and parity was measured with the cache full."""
    assert exported.report.parity[-1].length == exported.report.cache_length
    assert exported.report.cache_length % exported.report.prefill_chunk


def test_a_float16_model_is_exported_from_its_float32_values(shared_data, tmp_path):
    result = run(make_job(shared_data / "models" / "zh-tiny-llama", tmp_path / "out", **SMALL_SETTINGS))
    assert result.metrics["max_relative_difference"] <= 1e-4
    assert result.metrics["mindir_bytes"] > 4 * 1_742_208  # four bytes a parameter
