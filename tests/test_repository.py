"""What the repository promises about itself: commands that exist, a lock without addresses, nothing of one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app
from flows.settings import preset_names
from tasks.stages import STAGES

PROJECT = Path(__file__).parents[1]


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [PROJECT / line for line in listed.stdout.splitlines() if (PROJECT / line).is_file()]


def _commands() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    root = get_command(app)
    found = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for path, leaf in ((f"{name} {sub}", one) for sub, one in inner.items()) if inner else [(name, command)]:
            found[path] = {option for parameter in leaf.params for option in parameter.opts}
    return found


@pytest.mark.parametrize("command", sorted(_commands()))
def test_every_command_has_a_help_text_and_json(command):
    assert "--json" in _commands()[command]


def test_every_stage_is_described_in_the_artifact_root():
    artifacts = (PROJECT / "artifacts" / "README.md").read_text(encoding="utf-8")
    for stage in STAGES:
        assert f"| {stage} |" in artifacts


def test_every_preset_begins_with_a_comment_that_says_what_it_is():
    for name in preset_names():
        assert (PROJECT / "flows" / "presets" / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")


def test_the_lock_pins_every_package_and_holds_no_address_and_no_torch():
    lines = (PROJECT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!-]+", line) for line in pins)
    assert not any(re.match(r"(torch|torchvision|nvidia-.*|triton)==", line) for line in pins)


def test_no_tracked_file_names_a_registry_a_machine_path_or_is_large():
    words = ["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.org", "/wo" + r"rk/(main|steering|\.library)"]
    hosts = re.compile("|".join(words).encode())
    for path in _tracked():
        data = path.read_bytes()
        assert not hosts.search(data), path
        assert len(data) <= 2**20, path


def test_planning_and_help_import_nothing_heavy():
    code = (
        "import sys; import flows.cli;"
        "heavy = {'mindspore', 'mindnlp', 'mindvision', 'prefect', 'transformers', 'pyarrow', 'torch', 'matplotlib'};"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
