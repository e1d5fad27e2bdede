"""The embedded Prefect server, started for real."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.embedded import configured_server

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time, urllib.request
from pathlib import Path
from flows.embedded import prefect_api
with prefect_api(Path(sys.argv[1])):
    urllib.request.urlopen(os.environ["PREFECT_API_URL"] + "/health").close()
    sys.stdout.write(os.environ["PREFECT_API_URL"] + "\\n")
    sys.stdout.flush()
    time.sleep(float(sys.argv[2]))
"""


def _start(root: Path, folder: Path, seconds: float) -> subprocess.Popen:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT, str(root), str(seconds)],
        env={**clean, "PYTHONPATH": str(PROJECT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_starts_beside_a_broken_database_and_a_module_of_the_working_folder_and_ends_with_its_parent(tmp_path):
    home = tmp_path / "root" / "prefect-home"
    home.mkdir(parents=True)
    (home / "prefect.db").write_bytes(b"garbage " * 1000)
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    parent = _start(tmp_path / "root", tmp_path, 600)
    assert parent.stdout.readline().startswith("http://127.0.0.1:"), parent.stderr.read()
    assert [path.read_bytes()[:7] for path in home.glob("damaged-*/prefect.db")] == [b"garbage"]
    (server,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server.pid) and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.05)


@pytest.mark.parametrize("active", ["local", "other"])
def test_the_active_profile_of_the_user_is_respected(tmp_path, monkeypatch, active):
    (tmp_path / "profiles.toml").write_text(
        f'active = "{active}"\n[profiles.local]\nPREFECT_API_URL = "http://127.0.0.1:4200/api"\n[profiles.other]\n'
    )
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert configured_server() == ("http://127.0.0.1:4200/api" if active == "local" else None)
