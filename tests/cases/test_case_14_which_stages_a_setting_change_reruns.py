"""A changed setting reruns the first stage that uses it and all after it, and no other.

All changes of the case by the plan, over a store that was filled as a run fills it; three of them, one for each place
where the change can fall, by real runs through the command line.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import STAGES, Cli
from filled_store import fill, to_run

from flows.settings import artifact_root, load_config
from tasks.store import Store

CASE = next((Path(__file__).parents[1] / "data" / "cases").glob("14-*"))
CHANGES = json.loads((CASE / "changes.json").read_text(encoding="utf-8"))["single_changes_from_base"]


@dataclass
class Settings:
    """A user's folder with a settings file, its data, its base model and its tokenizer."""

    folder: Path
    values: dict[str, Any]
    name: str = "job"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    def write(self) -> str:
        self.file.write_text(yaml.safe_dump(self.values, sort_keys=False), encoding="utf-8")
        return str(self.file)


@pytest.fixture
def settings(tmp_path, stories) -> Settings:
    folder = tmp_path / "user"
    folder.mkdir()
    for name in ("base", "tokenizer"):
        shutil.copytree(stories, folder / name)
    shutil.copy(CASE / "train.jsonl", folder)
    values = {
        "model": {"base": "base", "tokenizer": "tokenizer"},
        "data": {"train": "train.jsonl", "validation_share": 0},
        "artifacts": str(tmp_path / "root"),
        "tokenize": {"template": "plain", "max_length": 256},
        "train": {
            "lora": {"rank": 4, "alpha": 8},
            "learning_rate": 0.0003,
            "epochs": 1,
            "seed": 7,
        },
        "export": {"parity_lengths": [1, 5]},
        "evaluate": {"temperature": 0.7, "top_p": 0.9, "samples": 1, "max_new_tokens": 4},
    }
    return Settings(folder, values)


def another_folder(settings: Settings) -> None:
    link = settings.folder.parent / "outputs"
    link.symlink_to(settings.folder.parent / "root")
    settings.values["artifacts"] = "../outputs"


def another_record(settings: Settings) -> None:
    text = (settings.folder / "train.jsonl").read_text(encoding="utf-8")
    (settings.folder / "train.jsonl").write_text(text.replace("题", "问", 1), encoding="utf-8")


def added_token(settings: Settings) -> None:
    path = settings.folder / "tokenizer" / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    free = max(document["model"]["vocab"].values())
    twin = dict(document["added_tokens"][-1], id=free, content="<extra>")
    document["added_tokens"].append(twin)
    path.write_text(json.dumps(document), encoding="utf-8")


def other_weights(settings: Settings) -> None:
    path = settings.folder / "base" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_order(settings: Settings) -> None:
    settings.values = dict(reversed(settings.values.items()))
    settings.values["train"] = dict(reversed(settings.values["train"].items()))


def more_log(settings: Settings) -> None:
    settings.values["train"]["log_every_steps"] = 1
    settings.environment["PREFECT_LOGGING_LEVEL"] = "DEBUG"


def put(section: str, **values: Any) -> Callable[[Settings], None]:
    return lambda settings: settings.values.setdefault(section, {}).update(values)


APPLY: dict[str, Callable[[Settings], None]] = {
    "nothing": lambda settings: None,
    "run name": lambda settings: setattr(settings, "name", "another-name"),
    "folder that outputs go to, with the same artifact store": another_folder,
    "log level": more_log,
    "order of the keys in the settings file": other_order,
    "learning rate written 3e-4 instead of 0.0003": put("train", learning_rate="3e-4"),
    "number of reader threads or worker processes": put("tokenize", workers=2),
    "one character of one record": another_record,
    "a file of the tokenizer (one added token)": added_token,
    "prompt template text": put("tokenize", template="alpaca"),
    "max_length": put("tokenize", max_length=128),
    "learning rate": put("train", learning_rate=0.0004),
    "lora rank": lambda settings: settings.values["train"]["lora"].update(rank=2),
    "number of epochs": put("train", epochs=2),
    "seed of training": put("train", seed=8),
    "weights of the base model, same name": other_weights,
    "precision of the merged weights": put("merge", dtype="float16"),
    "dynamic or fixed sequence length at export": put("export", cache_length=256),
    "temperature or top_p of the evaluation": put("evaluate", top_p=0.8),
    "evaluation prompts": put("evaluate", prompts=["Who are you?"]),
}


def test_every_change_of_the_case_is_tried():
    assert [change["change"] for change in CHANGES] == list(APPLY)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change["change"])
def test_by_the_plan_exactly_the_stages_listed_run_again(settings, change, monkeypatch):
    base = load_config(settings.write())
    fill(Store(artifact_root(base)), base)
    APPLY[change["change"]](settings)
    for name, value in settings.environment.items():
        monkeypatch.setenv(name, value)
    changed = load_config(settings.write())
    assert to_run(Store(artifact_root(changed)), changed) == change["run_again"]


def test_going_back_to_the_base_reuses_everything(settings):
    base = load_config(settings.write())
    store = Store(artifact_root(base))
    fill(store, base)
    for change in ("learning rate", "max_length", "evaluation prompts"):
        APPLY[change](settings)
        fill(store, load_config(settings.write()))
    assert to_run(store, base) == []


@pytest.mark.e2e
def test_by_real_runs_exactly_the_stages_listed_run_again(settings):
    cli = Cli(settings.folder.parent / "root")
    wanted = {change["change"]: change["run_again"] for change in CHANGES}
    before = settings.write()
    first = cli("run", before, "--json")
    assert first.code == 0, first.err
    kept = dict(settings.values)
    for change in ("temperature or top_p of the evaluation", "learning rate", "one character of one record"):
        settings.values = {name: dict(part) if isinstance(part, dict) else part for name, part in kept.items()}
        APPLY[change](settings)
        answer = cli("run", settings.write(), "--json")
        assert answer.code == 0, answer.err
        ran = [name for name in STAGES if answer.actions()[name] == "ran"]
        assert ran == wanted[change], change
