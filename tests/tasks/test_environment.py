"""The host as planning sees it, on constructed file systems; texts as Ascend's installers and Linux write them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.config import EnvConfig
from schemas.errors import HostError
from tasks import environment
from tasks.environment import (
    GIB,
    TESTED,
    Memory,
    cann_version,
    check_resources,
    device_nodes,
    driver_version,
    find_packages,
    guess_device,
    host_fingerprint,
    read_memory,
    read_version,
)

PROJECT = Path(__file__).parents[2]

DRIVER_INFO = """Version=25.2.0
ascendhal_version=7.35.23
aicpu_version=1.0
dvppkernels_version=1.0
tsfw_version=1.0
Innerversion=V100R001C22SPC001B220
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C22]
package_version=25.2.0
"""
TOOLKIT_INFO = """package_name=Ascend-cann-toolkit
version=8.2.RC1
innerversion=V100R001C22SPC001B231
compatible_version=[V100R001C15],[V100R001C18]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/8.2.RC1/aarch64-linux
"""
VERSION_CFG = """# version: 1.0
runtime_running_version=[7.3.0.1.220:8.0.RC2]
toolkit_running_version=[7.3.0.1.220:8.0.RC2]
runtime_installed_version=[7.3.0.1.220:8.0.RC2]
toolkit_installed_version=[7.3.0.1.220:8.0.RC2]
"""
MEMINFO = """MemTotal:       16777216 kB
MemFree:         2097152 kB
MemAvailable:    8388608 kB
Buffers:           20000 kB
"""


def put(host: Path, path: str, text: str = "") -> None:
    (host / path).parent.mkdir(parents=True, exist_ok=True)
    (host / path).write_text(text, encoding="utf-8")


@pytest.fixture
def ascend_host(tmp_path: Path) -> Path:
    for node in ("davinci10", "davinci2", "davinci_manager", "davinci0", "null"):
        put(tmp_path, f"dev/{node}")
    put(tmp_path, "usr/local/Ascend/driver/version.info", DRIVER_INFO)
    put(tmp_path, "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", TOOLKIT_INFO)
    return tmp_path


def test_tested_versions_are_those_of_the_lock_file():
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (PROJECT / "requirements.lock").read_text(), re.MULTILINE))
    assert {name: pins[name] for name in TESTED} == TESTED


def test_packages_are_judged_against_the_tested_versions(monkeypatch: pytest.MonkeyPatch):
    installed = {**TESTED, "numpy": "1.26.0"}
    del installed["prefect"]

    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise environment.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(environment.metadata, "version", version)
    found = {package.name: (package.found, package.tested, package.verdict) for package in find_packages()}
    assert found["numpy"] == ("1.26.0", TESTED["numpy"], "other version")
    assert found["prefect"] == (None, TESTED["prefect"], "missing")
    assert found["mindspore"] == (TESTED["mindspore"], TESTED["mindspore"], "tested")


def test_device_nodes_are_ordered_by_number_and_leave_out_the_manager(ascend_host: Path, tmp_path: Path):
    assert device_nodes(ascend_host) == ("davinci0", "davinci2", "davinci10")
    assert device_nodes(tmp_path / "empty") == ()


@pytest.mark.parametrize(
    ("choice", "with_nodes", "without"),
    [("auto", "Ascend", "CPU"), ("cpu", "CPU", "CPU"), ("ascend", "Ascend", "Ascend")],
)
def test_guess_goes_by_the_nodes_only_for_auto(
    ascend_host: Path, tmp_path: Path, choice: str, with_nodes: str, without: str
):
    assert guess_device(choice, ascend_host) == with_nodes
    assert guess_device(choice, tmp_path / "empty") == without


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (DRIVER_INFO, "25.2.0"),
        (TOOLKIT_INFO, "8.2.RC1"),
        (VERSION_CFG, "8.0.RC2"),
        ("compatible_version=[V100R001C15]\ninnerversion=V100\n", None),
        ("", None),
    ],
)
def test_version_files_of_driver_and_cann_are_read(text: str, version: str | None):
    assert read_version(text) == version


def test_driver_and_cann_are_found_where_their_installers_put_them(ascend_host: Path):
    assert driver_version(ascend_host) == "25.2.0"
    assert cann_version(ascend_host, {}) == "8.2.RC1"
    put(ascend_host, "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", "version=8.5.0\n")
    assert cann_version(ascend_host, {}) == "8.5.0"


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_HOME"])
def test_cann_named_by_the_environment_comes_first(ascend_host: Path, variable: str):
    put(ascend_host, "opt/cann/version.cfg", VERSION_CFG)
    assert cann_version(ascend_host, {variable: "/opt/cann"}) == "8.0.RC2"


def test_version_file_of_unknown_format_still_tells_changes_apart(tmp_path: Path):
    put(tmp_path, "usr/local/Ascend/driver/version.info", '{"release": 26}')
    first = driver_version(tmp_path)
    put(tmp_path, "usr/local/Ascend/driver/version.info", '{"release": 27}')
    assert first is not None
    assert first.startswith("unknown format")
    assert first != driver_version(tmp_path)


def test_host_without_ascend_software_has_no_versions(tmp_path: Path):
    assert driver_version(tmp_path) is None
    assert cann_version(tmp_path, {}) is None


def test_fingerprint_changes_with_each_thing_that_can_change_the_probe(ascend_host: Path):
    start = host_fingerprint(ascend_host, {})
    assert start == host_fingerprint(ascend_host, {})
    assert start["device nodes"] == "davinci0 davinci2 davinci10"
    assert start["package numpy"] == TESTED["numpy"]
    put(ascend_host, "usr/local/Ascend/driver/version.info", DRIVER_INFO.replace("25.2.0", "25.3.RC1"))
    newer = host_fingerprint(ascend_host, {})
    assert {name for name in start if start[name] != newer[name]} == {"driver"}
    (ascend_host / "dev/davinci2").unlink()
    fewer = host_fingerprint(ascend_host, {})
    assert {name for name in newer if newer[name] != fewer[name]} == {"device nodes"}
    sourced = host_fingerprint(ascend_host, {"LD_LIBRARY_PATH": "/usr/local/Ascend/driver/lib64"})
    assert {name for name in fewer if fewer[name] != sourced[name]} == {"variable LD_LIBRARY_PATH"}


def test_fingerprint_without_an_npu_ignores_the_environment(tmp_path: Path):
    assert host_fingerprint(tmp_path, {}) == host_fingerprint(tmp_path, {"LD_LIBRARY_PATH": "/opt/lib"})


def test_memory_of_a_host_without_limits_is_what_the_kernel_says(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    assert read_memory(tmp_path) == Memory(16 * GIB, 8 * GIB)


def test_lower_limit_of_a_container_counts_in_cgroup_version_2(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    put(tmp_path, "proc/self/cgroup", "0::/kubepods/pod1\n")
    put(tmp_path, "sys/fs/cgroup/kubepods/pod1/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/kubepods/pod1/memory.current", f"{GIB}\n")
    put(tmp_path, "sys/fs/cgroup/kubepods/memory.max", f"{4 * GIB}\n")  # the parent's limit holds too
    put(tmp_path, "sys/fs/cgroup/kubepods/memory.current", f"{3 * GIB}\n")
    put(tmp_path, "sys/fs/cgroup/kubepods/memory.stat", f"anon 5\ninactive_file {GIB // 2}\nactive_file 7\n")
    assert read_memory(tmp_path) == Memory(4 * GIB, 3 * GIB // 2)


def test_lower_limit_of_a_container_counts_in_cgroup_version_1(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    # inside the container the path is the outer one, which is not there; only the mount's root is
    put(tmp_path, "proc/self/cgroup", "9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.stat", f"cache 1\ntotal_inactive_file {GIB // 4}\n")
    assert read_memory(tmp_path) == Memory(2 * GIB, 5 * GIB // 4)


def test_unlimited_cgroup_and_one_above_the_machine_change_nothing(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    put(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert read_memory(tmp_path) == Memory(16 * GIB, 8 * GIB)


def test_enough_of_both_gives_what_is_free(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    found = check_resources(EnvConfig(min_free_disk_gib=0, min_free_memory_gib=8), tmp_path / "not" / "yet", tmp_path)
    assert found["free_memory_bytes"] == 8 * GIB
    assert found["free_disk_bytes"] > 0


def test_too_little_memory_is_refused_with_both_numbers(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    with pytest.raises(HostError, match=r"Only 8\.00 GiB of memory are free; env\.min_free_memory_gib asks for 8\.5"):
        check_resources(EnvConfig(min_free_disk_gib=0, min_free_memory_gib=8.5), tmp_path, tmp_path)


def test_too_little_disk_is_refused_with_the_place(tmp_path: Path):
    put(tmp_path, "proc/meminfo", MEMINFO)
    wanted = EnvConfig(min_free_disk_gib=1e9)
    with pytest.raises(HostError, match=rf"GiB are free below {tmp_path}; .* asks for 1e\+09"):
        check_resources(wanted, tmp_path / "root", tmp_path)


def test_this_host_can_be_read():
    memory = read_memory()
    assert 0 < memory.free <= memory.total
    assert set(host_fingerprint()) >= {"python", "platform", "machine", "device nodes", "driver", "cann"}


def test_looking_at_the_host_imports_nothing_heavy():
    script = (
        "import sys, tasks.environment as e; e.host_fingerprint(); e.read_memory();"
        "print([n for n in ('mindspore', 'mindnlp', 'numpy', 'prefect', 'transformers', 'psutil') if n in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert ended.stdout.strip() == "[]"
