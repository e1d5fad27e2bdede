"""Stage `validate_env`: is this host fit, and which device will compute?

The report is reused as long as the host's fingerprint stays the same; free disk and memory, which change from run to
run, are looked at by `tasks/environment.py` before each one.
"""

import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemas.config import DeviceChoice
from schemas.errors import HostError
from schemas.manifest import StageJob, StageResult
from schemas.reports import EnvReport, PackageFinding
from tasks.environment import (
    NO_NODE,
    NOT_NEEDED,
    PYTHON,
    ROOT,
    cann_version,
    device_nodes,
    driver_version,
    find_packages,
    read_memory,
)
from tasks.files import digest_of, write_atomically
from tasks.probe import LIMIT, Device, Probe, ProbeError, probe
from tasks.stages import StageContext

log = logging.getLogger("mindtune.validate_env")

# may differ between two looks at one host
VARYING = {"cores", "total_memory_bytes", "probe_seconds"}


@dataclass(frozen=True)
class Choice:
    """The device, why it was taken, and what the probe on it gave."""

    device: Device
    reason: str
    probe: Probe


def run(job: StageJob, context: StageContext) -> StageResult:
    """Write `report.json` (EnvReport).

    Raises:
        HostError: Python or a package does not fit, or the device asked for can't compute.
    """
    check_python(platform.python_version())
    packages = find_packages()
    check_packages(packages)
    context.report_progress(0, 1, "trying the device")
    choice = choose_device(job.config.env.device)
    log.info("device %s: %s", choice.device, choice.reason)
    report = EnvReport(
        python=platform.python_version(),
        platform=platform.platform(),
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        total_memory_bytes=read_memory().total,
        packages=packages,
        driver=driver_version(),
        cann=cann_version(),
        device=choice.device,
        device_reason=choice.reason,
        probe_error=choice.probe.difference,
        probe_seconds=choice.probe.seconds,
    )
    write_atomically(Path(job.output) / "report.json", report.model_dump_json(indent=1))
    context.report_progress(1, 1, f"device {choice.device}")
    lasting = json.loads(report.model_dump_json(exclude=VARYING))
    return StageResult(
        metrics={"device": choice.device, "device_reason": choice.reason},
        payload={"host": digest_of(lasting)},
        volatile=("report.json",),
    )


def check_python(found: str) -> None:
    """Refuse another Python than the one that the locked set is for.

    Args:
        found: full version, for example 3.11.7.

    Raises:
        HostError: it is another minor version.
    """
    if found.split(".")[:2] != PYTHON.split("."):
        raise HostError("env.python", found=found, wanted=PYTHON)


def check_packages(packages: tuple[PackageFinding, ...]) -> None:
    """Warn of packages in another version than the tested one, and refuse a host that lacks a needed one.

    Raises:
        HostError: a needed package is missing.
    """
    for package in packages:
        if package.verdict == "other version":
            log.warning("%s %s is installed; mindtune is tested with %s", package.name, package.found, package.tested)
        elif package.verdict == "missing" and package.name in NOT_NEEDED:
            log.warning("%s is missing; this job does not need it", package.name)
    missing = [f"{package.name}=={package.tested}" for package in packages if package.verdict == "missing"]
    missing = [name for name in missing if name.split("==")[0] not in NOT_NEEDED]
    if missing:
        raise HostError("env.packages", missing=", ".join(missing))


def choose_device(wanted: DeviceChoice, host: Path = ROOT, try_device: Callable[[Device], Probe] = probe) -> Choice:
    """Take an NPU where one is wanted and computes rightly, else the CPU where that is allowed.

    Args:
        wanted: `auto` falls back to the CPU, `ascend` does not, `cpu` looks at no NPU.
        host: root of the file system.
        try_device: computes a small product on a device.

    Raises:
        HostError: an NPU was asked for and none is usable, or the CPU itself computes wrongly or not at all.
    """
    if wanted == "cpu":
        return Choice("CPU", "asked for", _probe_cpu(try_device))
    nodes = device_nodes(host)
    if nodes:
        problem, found = _probe_ascend(try_device)
        if found is not None:
            return Choice("Ascend", f"{', '.join(nodes)} computed a small product rightly", found)
    else:
        problem = NO_NODE
    if wanted == "ascend":
        raise HostError("env.no_ascend", reason=problem)
    if nodes:
        log.warning("%s present but not usable: %s", ", ".join(nodes), problem)
    return Choice("CPU", f"no usable Ascend NPU: {problem}", _probe_cpu(try_device))


def _probe_ascend(try_device: Callable[[Device], Probe]) -> tuple[str, Probe | None]:
    """Why the NPU is not usable, or its probe."""
    try:
        found = try_device("Ascend")
    except ProbeError as error:
        return f"a small computation on it failed: {error}", None
    if not found.difference <= LIMIT:  # also true of NaN
        return f"a small computation on it was wrong by {found.difference:g}", None
    return "", found


def _probe_cpu(try_device: Callable[[Device], Probe]) -> Probe:
    try:
        found = try_device("CPU")
    except ProbeError as error:
        raise HostError("env.probe_failed", device="CPU", reason=str(error)) from error
    if not found.difference <= LIMIT:  # also true of NaN
        raise HostError("env.probe", device="CPU", difference=f"{found.difference:g}", limit=f"{LIMIT:g}")
    return found
