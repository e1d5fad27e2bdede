"""The choice of the device, the probe in its own process, and the stage's report."""

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.config import DataConfig, EnvConfig, LlmConfig, ModelConfig
from schemas.errors import HostError
from schemas.manifest import StageJob, StageResult
from schemas.reports import EnvReport, PackageFinding
from tasks import validate_env
from tasks.environment import TESTED, device_nodes
from tasks.probe import Device, Probe, ProbeError, probe
from tasks.stages import StageContext
from tasks.validate_env import check_packages, check_python, choose_device

GOOD = Probe(difference=0.0, seconds=0.1)
CONTEXT = StageContext(report_progress=lambda done, total, text: None, stop_requested=lambda: False)

TryDevice = Callable[[Device], Probe]


def devices(**outcomes: Probe | Exception) -> TryDevice:
    """A stand-in for the probe, with an outcome for each device that may be tried."""

    def try_device(device: Device) -> Probe:
        outcome = outcomes[device]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return try_device


@pytest.fixture
def with_nodes(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").touch()
    return tmp_path


@pytest.fixture
def without_nodes(tmp_path: Path) -> Path:
    return tmp_path / "empty"


@pytest.mark.parametrize("wanted", ["auto", "ascend"])
def test_npu_that_computes_rightly_is_taken(with_nodes: Path, wanted: str):
    choice = choose_device(wanted, with_nodes, devices(Ascend=GOOD))
    assert (choice.device, choice.probe) == ("Ascend", GOOD)
    assert "davinci0" in choice.reason


@pytest.mark.parametrize("wrong", [0.5, math.nan, math.inf])
def test_npu_that_computes_wrongly_is_not_taken(with_nodes: Path, wrong: float):
    choice = choose_device("auto", with_nodes, devices(Ascend=Probe(wrong, 1.0), CPU=GOOD))
    assert choice.device == "CPU"
    assert f"wrong by {wrong:g}" in choice.reason
    with pytest.raises(HostError, match=rf"No usable Ascend NPU: .*wrong by {wrong:g}"):
        choose_device("ascend", with_nodes, devices(Ascend=Probe(wrong, 1.0)))


def test_npu_that_fails_gives_its_error_as_the_reason(with_nodes: Path, caplog: pytest.LogCaptureFixture):
    broken = ProbeError("RuntimeError: libge_runner.so: cannot open shared object file")
    choice = choose_device("auto", with_nodes, devices(Ascend=broken, CPU=GOOD))
    assert choice.device == "CPU"
    assert "libge_runner.so: cannot open shared object file" in choice.reason
    assert "davinci0 present but not usable" in caplog.text
    with pytest.raises(HostError, match="libge_runner"):
        choose_device("ascend", with_nodes, devices(Ascend=broken))


def test_auto_without_device_node_takes_the_cpu_without_trying_an_npu(without_nodes: Path):
    choice = choose_device("auto", without_nodes, devices(CPU=GOOD))
    assert choice.device == "CPU"
    assert "/dev/davinci" in choice.reason


def test_ascend_without_device_node_is_refused(without_nodes: Path):
    with pytest.raises(HostError, match="there is no device node /dev/davinci") as caught:
        choose_device("ascend", without_nodes, devices())
    assert caught.value.exit_code == 3
    assert "--device cpu" in caught.value.hint


def test_cpu_is_taken_without_looking_at_an_npu(with_nodes: Path):
    assert choose_device("cpu", with_nodes, devices(CPU=GOOD)).device == "CPU"


def test_cpu_that_computes_wrongly_or_not_at_all_is_refused(without_nodes: Path):
    with pytest.raises(HostError, match=r"on CPU was wrong: largest difference 0\.25, at most 0 expected"):
        choose_device("cpu", without_nodes, devices(CPU=Probe(0.25, 1.0)))
    with pytest.raises(HostError, match="on CPU failed: it was ended by SIGILL"):
        choose_device("auto", without_nodes, devices(CPU=ProbeError("it was ended by SIGILL")))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("import sys; sys.stderr.write('first\\ndrvDevice failed\\n'); sys.exit(7)", "exit code 7; .*drvDevice failed"),
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
        ("import sys; open(sys.argv[2], 'w').write('{\"error\": \"RuntimeError: no\"}')", "RuntimeError: no"),
    ],
)
def test_probe_that_crashes_hangs_or_fails_becomes_a_reason(script: str, reason: str):
    with pytest.raises(ProbeError, match=reason):
        probe("Ascend", (sys.executable, "-S", "-c", script), timeout_seconds=0.5 if "sleep" in script else 30)


def test_probe_of_an_absent_npu_gives_mindspores_own_words():
    if device_nodes():
        pytest.skip("this host has NPU nodes")
    with pytest.raises(ProbeError, match="Ascend"):
        probe("Ascend")


def test_python_of_another_minor_version_is_refused():
    check_python("3.11.99")
    with pytest.raises(HostError, match=r"Python 3\.12\.1 is not supported; wanted 3\.11") as caught:
        check_python("3.12.1")
    assert caught.value.exit_code == 3


def finding(name: str, found: str | None, verdict: str) -> PackageFinding:
    return PackageFinding(name=name, found=found, tested=TESTED[name], verdict=verdict)


def test_missing_needed_packages_are_refused_all_at_once():
    packages = (
        finding("numpy", None, "missing"),
        finding("pyarrow", None, "missing"),
        finding("mindvision", None, "missing"),  # not needed
    )
    with pytest.raises(HostError, match=r"Packages are missing: numpy==1\.26\.4, pyarrow==25\.0\.1\.") as caught:
        check_packages(packages)
    assert caught.value.exit_code == 3
    assert "requirements.lock" in caught.value.hint


def test_other_versions_and_missing_spare_packages_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_packages((finding("numpy", "1.26.0", "other version"), finding("mindvision", None, "missing")))
    assert "numpy 1.26.0 is installed; mindtune is tested with 1.26.4" in caplog.text
    assert "mindvision is missing" in caplog.text


def run_stage(folder: Path) -> tuple[StageResult, EnvReport]:
    folder.mkdir()
    config = LlmConfig(
        model=ModelConfig(base="base"), data=DataConfig(train=("train.json",)), env=EnvConfig(device="cpu")
    )
    job = StageJob(
        stage="validate_env",
        key="0" * 64,
        run="test",
        config=config,
        inputs={},
        sources={},
        output=str(folder),
        work=str(folder),
        device="CPU",
    )
    result = validate_env.run(job, CONTEXT)
    return result, EnvReport.model_validate_json((folder / "report.json").read_text(encoding="utf-8"))


def test_stage_reports_this_host_and_a_probe_without_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result, report = run_stage(tmp_path / "first")
    assert result.metrics["device"] == report.device == "CPU"
    assert report.device_reason == "asked for"
    assert report.probe_error == 0  # the factors are exact, so any right product is
    assert report.probe_seconds > 0
    assert {package.name for package in report.packages} == set(TESTED)
    assert result.volatile == ("report.json",)

    # times and loads differ between two looks; the payload is the host
    monkeypatch.setattr(validate_env, "choose_device", lambda wanted: validate_env.Choice("CPU", "asked for", GOOD))
    monkeypatch.setattr(validate_env.os, "sched_getaffinity", lambda _: {0})
    again, other = run_stage(tmp_path / "second")
    assert other.probe_seconds != report.probe_seconds
    assert again.payload == result.payload
    monkeypatch.setattr(validate_env, "driver_version", lambda: "25.2.0")
    assert run_stage(tmp_path / "third")[0].payload != result.payload
