"""What this host is: versions, NPU device nodes, driver, CANN, free disk and memory.

Planning reads it before every run, so it imports the standard library and the contracts only and starts no device.
Files are read below `host`, the root of the file system; tests give a constructed one. Whether an NPU really computes
is for `tasks/validate_env.py` to find out.
"""

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from schemas.config import DeviceChoice, EnvConfig
from schemas.errors import HostError
from schemas.reports import PackageFinding

PYTHON = "3.11"
TESTED = {
    "mindspore": "2.7.0",
    "mindnlp": "0.5.1",
    "mindvision": "0.1.0",
    "numpy": "1.26.4",
    "pyarrow": "25.0.1",
    "prefect": "3.9.1",
    "pydantic": "2.14.4",
    "transformers": "4.57.6",
    "safetensors": "0.8.0",
    "tokenizers": "0.22.2",
}
NOT_NEEDED = frozenset({"mindnlp", "mindvision"})  # no stage of the job llm imports them

ROOT = Path("/")
NO_NODE = "there is no device node /dev/davinci*"
GIB = 2**30
DRIVER_FILES = ("usr/local/Ascend/driver/version.info", "var/davinci/driver/version.info")
# newest layout first: CANN 8.5 moved from ascend-toolkit/latest to cann
CANN_FOLDERS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/nnae/latest")
CANN_FILES = ("*-linux/ascend_toolkit_install.info", "ascend_nnae_install.info", "version.cfg")
# variables that decide whether a present NPU can be used by this process
ASCEND_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)


@dataclass(frozen=True)
class Memory:
    """Main memory that this process may use, in bytes; the lower of the machine's and of its container's limits."""

    total: int
    free: int


def find_packages() -> tuple[PackageFinding, ...]:
    """Each package of the tested set with the version installed here, read from its metadata; nothing is imported."""
    return tuple(_find_package(name, tested) for name, tested in TESTED.items())


def _find_package(name: str, tested: str) -> PackageFinding:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return PackageFinding(name=name, found=None, tested=tested, verdict="missing")
    verdict: Literal["tested", "other version"] = "tested" if found == tested else "other version"
    return PackageFinding(name=name, found=found, tested=tested, verdict=verdict)


def host_fingerprint(host: Path = ROOT, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All that can change the outcome of the device probe; the key of `validate_env` depends on it.

    Without NPU nodes the variables of the Ascend software are left out: they can't change anything then.

    Args:
        host: root of the file system.
        environ: environment variables.
    """
    nodes = device_nodes(host)
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device nodes": " ".join(nodes),
        "driver": driver_version(host) or "",
        "cann": cann_version(host, environ) or "",
    }
    facts |= {f"package {package.name}": package.found or "" for package in find_packages()}
    if nodes:
        facts |= {f"variable {name}": environ.get(name, "") for name in ASCEND_VARIABLES}
    return facts


def device_nodes(host: Path = ROOT) -> tuple[str, ...]:
    """Names of the NPU device nodes (`davinci0`, ...) in the order of their numbers."""
    found = (re.fullmatch(r"davinci(\d+)", path.name) for path in (host / "dev").glob("davinci*"))
    return tuple(match[0] for match in sorted((match for match in found if match), key=lambda match: int(match[1])))


def guess_device(choice: DeviceChoice, host: Path = ROOT) -> Literal["CPU", "Ascend"]:
    """The device that a run will probably use, before it was probed: `auto` goes by the device nodes alone."""
    if choice == "auto":
        return "Ascend" if device_nodes(host) else "CPU"
    return "Ascend" if choice == "ascend" else "CPU"


def driver_version(host: Path = ROOT) -> str | None:
    """Version of the NPU driver, or None where its version file is absent."""
    return _first_version(host / name for name in DRIVER_FILES)


def cann_version(host: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str | None:
    """Version of CANN below ASCEND_HOME_PATH (or the older ASCEND_HOME), else below the usual folders; None: absent."""
    named = [environ[name].lstrip("/") for name in ("ASCEND_HOME_PATH", "ASCEND_HOME") if environ.get(name)]
    folders = [host / folder for folder in (*named, *CANN_FOLDERS)]
    return _first_version(path for folder in folders for name in CANN_FILES for path in sorted(folder.glob(name)))


def _first_version(paths: Iterator[Path]) -> str | None:
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # a format not known yet still has to change the fingerprint when the file changes
        return read_version(text) or f"unknown format, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return None


def read_version(text: str) -> str | None:
    """The version in a version file of the Ascend software, or None where there is none.

    Driver and toolkit write `Version=25.2.0`; version.cfg writes `toolkit_installed_version=[7.7.0.1.231:8.2.RC1]`.
    """
    plain = re.search(r"^(?:package_)?version[ \t]*=[ \t]*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    listed = re.search(
        r"^(?:toolkit|runtime)_(?:installed|running)_version=\[[^:\]\n]*:([^\]\n]+)\]", text, re.MULTILINE
    )
    found = plain or listed
    return found[1] if found else None


def check_resources(config: EnvConfig, root: Path, host: Path = ROOT) -> dict[str, int]:
    """Free disk and memory now, in bytes, as `free_disk_bytes` and `free_memory_bytes`; looked at before every run.

    Args:
        config: the wanted minimum of both.
        root: artifact root; where it does not exist yet, its nearest existing parent is looked at.
        host: root of the file system, for `/proc` and `/sys`.

    Raises:
        HostError: less is free than the configuration asks for, or it asks for an NPU and there is not even a node.
    """
    if config.device == "ascend" and not device_nodes(host):
        raise HostError("env.no_ascend", reason=NO_NODE)
    place = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    disk = shutil.disk_usage(place).free
    if disk < config.min_free_disk_gib * GIB:
        raise HostError(
            "env.disk", free_gib=f"{disk / GIB:.2f}", path=place, wanted_gib=f"{config.min_free_disk_gib:g}"
        )
    memory = read_memory(host).free
    if memory < config.min_free_memory_gib * GIB:
        raise HostError("env.memory", free_gib=f"{memory / GIB:.2f}", wanted_gib=f"{config.min_free_memory_gib:g}")
    return {"free_disk_bytes": disk, "free_memory_bytes": memory}


def read_memory(host: Path = ROOT) -> Memory:
    """Total and free main memory; a container's limit (cgroup version 1 or 2) counts where it is lower."""
    lines = (host / "proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    for limit, unused in _group_limits(host):
        total, free = min(total, limit), min(free, unused)
    return Memory(total, free)


def _group_limits(host: Path) -> Iterator[tuple[int, int]]:
    """Limit and what is left of it, in bytes, of each control group that this process is in."""
    groups = host / "sys/fs/cgroup"
    try:
        lines = (host / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # no control groups
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, limit_file, used_file, cache_line = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_line = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        # a parent's limit holds too; inside a container the path may be the outer one, and only the base exists
        for group in (folder, *folder.parents[: len(folder.parts) - len(base.parts)]):
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                yield limit, max(0, limit - used + _cached(group / "memory.stat", cache_line))


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file or it says `max`, that is no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(path: Path, line: str) -> int:
    """File cache that the kernel gives back before a limit strikes, in bytes."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(rf"^{line} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
