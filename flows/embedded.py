"""Prefect without a server of the user's: a private one for the time of a run, with a home below the artifact root.

Prefect 3.9.1 starts such a server by itself, but it is left running when the process that started it is killed, and it
loses task-run records at the end (PrefectHQ/prefect, `SubprocessASGIServer`). This one dies with its parent.
"""

import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import HostError
from tasks.child import die_with_parent
from tasks.runner import child_environment

START_SECONDS = 90.0
DATABASE = "prefect.db"

log = logging.getLogger("mindtune.prefect")


def configured_server() -> str | None:
    """The API address that the user has configured, by PREFECT_API_URL or by the active Prefect profile."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


@contextlib.contextmanager
def prefect_api(root: Path) -> Iterator[None]:
    """Have a Prefect API to run flows on: the configured server, else an embedded one. Import Prefect inside only.

    Args:
        root: artifact root; the embedded server keeps its database in `prefect-home` below it.

    Raises:
        HostError: the embedded server does not come up (prefect.no_server), or the configured one does not answer
            (prefect.unreachable).
    """
    if url := configured_server():
        _check_reachable(url)
        yield
        return
    home = root / "prefect-home"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        PREFECT_HOME=str(home),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
        PREFECT_LOGGING_LEVEL=os.environ.get("PREFECT_LOGGING_LEVEL", "CRITICAL"),
        PREFECT_SERVER_LOGGING_LEVEL="ERROR",
        PREFECT_CLIENT_MAX_RETRIES="3",  # 14 s instead of 62 s until a server that was killed is given up
        PREFECT_LOGGING_TO_API_ENABLED="false",  # the logs lie in the artifacts; the server ends before the last ones
    )
    with (home / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two servers at once would both create the database
        server, port = _start(home)
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    try:
        yield
    finally:
        del os.environ["PREFECT_API_URL"]
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _check_reachable(url: str) -> None:
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is for Prefect to say
    except (OSError, ValueError) as error:
        raise HostError("prefect.unreachable", url=url, problem=getattr(error, "reason", error)) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(home: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on the database of a home; a database that it can't work with is moved aside once."""
    try:
        return _launch(home)
    except HostError as error:
        if not (home / DATABASE).exists():
            raise
        aside = home / f"damaged-{time.time_ns()}"
        aside.mkdir()
        for path in home.glob(f"{DATABASE}*"):
            path.rename(aside / path.name)
        log.warning("%s The database of past runs was moved to %s; artifacts are not affected.", error.message, aside)
        return _launch(home)


def _launch(home: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = _free_port()
    with (home / "server.log").open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.embedded", str(os.getpid()), str(port)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline and server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2).close()
                return server, port
            except OSError:
                time.sleep(0.1)
    except BaseException:
        server.kill()
        server.wait()
        raise
    ended = server.poll()
    server.kill()
    server.wait()
    problem = f"no answer within {START_SECONDS:g} s" if ended is None else f"it ended with exit code {ended}"
    raise HostError("prefect.no_server", problem=problem, log=home / "server.log")


def _serve(parent: int, port: int) -> None:
    die_with_parent(parent)
    command = [
        sys.executable,
        "-P",
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    os.execv(sys.executable, command)  # the wish to die with the parent survives exec


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
