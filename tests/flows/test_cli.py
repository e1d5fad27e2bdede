"""Bad input ends with exit code 2 and one readable message, before any stage runs and without heavy imports."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import imported_packages

PRESET = "stories260k"


def _bad_data(folder: Path) -> list[str]:
    (folder / "bad.json").write_text("<html>not found</html>\n" * 100)
    return ["--set", f"data.train=[{folder / 'bad.json'}]"]


def _other_keys(folder: Path) -> list[str]:
    (folder / "keys.json").write_text('[{"q": "x", "a": "y"}]')
    return ["--set", f"data.train=[{folder / 'keys.json'}]"]


def _base_without_weights(folder: Path, stories: Path) -> list[str]:
    shutil.copytree(stories, folder / "base")
    (folder / "base" / "model.safetensors").unlink()
    return ["--set", f"model.base={folder / 'base'}"]


def _cut_weights(folder: Path, stories: Path) -> list[str]:
    shutil.copytree(stories, folder / "base")
    weights = folder / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return ["--set", f"model.base={folder / 'base'}"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("unknown key", "config.invalid", "did you mean learning_rate?"),
        ("negative rank", "config.invalid", "train.lora.rank"),
        ("missing data", "data.file_missing", "gone.json does not exist"),
        ("no record", "data.no_record", "bad.json"),
        ("other keys", "data.unknown_keys", "{instruction: q, output: a}"),
        ("no weights", "model.no_weights", "no *.safetensors"),
        ("cut weights", "model.weights_unreadable", "model.safetensors"),
        ("no such layer", "lora.no_match", "q_porj"),
        ("long cache", "model.too_short", "export.cache_length (4096)"),
        ("unknown preset", "config.unknown_preset", "stories260k"),
    ],
)
def test_bad_input_is_refused_before_any_stage(cli, tmp_path, stories, name, code, words):
    arguments = {
        "unknown key": lambda: ["--set", "train.learning_rat=1"],
        "negative rank": lambda: ["--set", "train.lora.rank=-4"],
        "missing data": lambda: ["--set", f"data.train=[{tmp_path / 'gone.json'}]"],
        "no record": lambda: _bad_data(tmp_path),
        "other keys": lambda: _other_keys(tmp_path),
        "no weights": lambda: _base_without_weights(tmp_path, stories),
        "cut weights": lambda: _cut_weights(tmp_path, stories),
        "no such layer": lambda: ["--set", "train.lora.target_modules=[q_porj]"],
        "long cache": lambda: ["--set", "export.cache_length=4096"],
        "unknown preset": list,
    }[name]()
    preset = "storys" if name == "unknown preset" else PRESET
    answer = cli("run", preset, *arguments, "--json", PYTHONPROFILEIMPORTTIME="1")
    assert answer.code == 2, answer.err
    error = answer.document["error"]
    assert error["code"] == code
    assert words in error["message"] + error["hint"]
    assert error["hint"]
    assert not cli.root.exists() or not list(cli.root.glob("runs/*"))
    assert imported_packages(answer.err).isdisjoint({"mindspore", "prefect", "transformers"})


def test_without_json_the_message_is_on_standard_error(cli):
    answer = cli("run", PRESET, "--set", "train.lora.rank=-4")
    assert answer.code == 2
    assert answer.out == ""
    assert "train.lora.rank" in answer.err
    assert "Traceback" not in answer.err


def test_ascend_without_an_npu_is_not_fit(cli):
    answer = cli("run", PRESET, "--device", "ascend", "--json")
    assert answer.code == 3
    assert answer.document["error"]["code"] == "env.no_ascend"
    assert "davinci" in answer.document["error"]["message"]


def test_an_unknown_option_or_stage_is_a_bad_argument(cli):
    for arguments in (["run", PRESET, "--nonsense"], ["stage", "trian"], ["run"], ["run", PRESET, "--device", "gpu"]):
        answer = cli(*arguments, "--json")
        assert answer.code == 2
        assert answer.document["error"]["code"] == "usage"
    assert cli("stage", "trian").code == 2
    assert cli("--help").code == 0


def test_an_empty_root_has_no_runs_and_says_so(cli):
    assert json.loads(cli("runs", "--json").out) == {"runs": [], "unreadable": []}
    answer = cli("show", "latest", "--json")
    assert answer.code == 2
    assert answer.document["error"]["code"] == "store.no_run"


def test_too_little_disk_or_memory_is_not_fit_before_any_stage(cli):
    answer = cli("run", PRESET, "--set", "env.min_free_memory_gib=100000", "--json")
    assert answer.code == 3
    assert answer.document["error"]["code"] == "env.memory"


def test_a_stage_that_fails_is_told_once_and_recorded(cli, tmp_path):
    (tmp_path / "long.json").write_text(f'[{{"instruction": "a", "output": "{"b" * 9000}"}}]')
    answer = cli("run", PRESET, "--set", f"data.train=[{tmp_path / 'long.json'}]", "--json")
    assert answer.code == 2
    assert answer.document["error"]["code"] == "data.nothing_left"
    assert answer.document["error"]["stage"] == "tokenize"
    assert list(answer.actions().values()) == ["ran", "failed", *["not_run"] * 4]
    assert "Traceback" not in answer.err
    shown = cli("show", "latest", "--json").document
    assert (shown["status"], shown["error"]) == ("failed", answer.document["error"])


def test_a_configured_server_that_does_not_answer_is_named_before_any_stage(cli):
    answer = cli("run", PRESET, "--json", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert answer.code == 3
    assert answer.document["error"]["code"] == "prefect.unreachable"
    assert "http://127.0.0.1:9/api" in answer.document["error"]["message"]
    assert set(answer.actions().values()) == {"not_run"}
