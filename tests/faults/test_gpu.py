"""A GPU, a driver or a library that is not what it was: by a stand-in for NVML, and one for the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import clocks, environment, job
from harness.device import CpuDevice
from harness.environment import EnvironmentFault, choose_device, find_gpus, require_gpu
from harness.job import Bench, Supervision
from harness.lock import FOLDER_VARIABLE
from harness.monitor import GpuMonitor
from harness.record import Record, read_record, write_record
from harness.supervisor import ReportStep
from tests.harness.conftest import NVMLError, StandInNvml

ROOT = Path(__file__).parents[2]
UUID = "GPU-aaaa"
GPU = (UUID, "NVIDIA H200")

InstallNvml = Callable[..., StandInNvml]


@pytest.fixture
def nvml(install_nvml: InstallNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInNvml:
    """One GPU, which the CPU stands in for when it is opened."""
    nvml = install_nvml(GPU)
    nvml.readings = {
        "clock": [1980],
        "temperature": [40],
        "power": [90_000],
        "reasons": [0],
        "processes": [[]],
    }
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    monkeypatch.setattr(environment, "_version", lambda package: "2.13.0")  # as with CUDA
    monkeypatch.setattr(job, "open_device", lambda kind: CpuDevice())
    monkeypatch.setattr(job, "pin_to_gpu", lambda uuid: None)
    monkeypatch.setattr(job, "describe", lambda device, root: {"key": environment.environment_key(device)})
    return nvml


def spec() -> dict[str, Any]:
    key = environment.environment_key("cuda")
    implementation = {"name": "mine", "kernel": "naive", "options": {}}
    return {"phase": "timing", "device": "cuda", "environment": key, "implementation": implementation}


def measure(path: Path, spec: dict[str, Any], fault: Callable[[], None] | None = None) -> Record:
    """A job of two processes, as a timing is; the fault is in the second one, while it is watched."""

    def work(bench: Bench, process: int, report_step: ReportStep) -> dict[str, Any]:
        report_step("cold samples")
        with bench.watch() as monitor:
            if process == 1 and fault is not None:
                fault()
            latency_ms = min(bench.device.series(lambda: None, 3, cold=False).latencies_ms)
        return {"latency_ms": latency_ms, **monitor.summary()}

    find_gpus.cache_clear()  # a job is a process of its own
    with Supervision(spec, ROOT, time_limit_s=60.0, timed=True) as supervision:
        outcomes = supervision.run(range(2), work, fresh_child_each=True)
    failed = next((outcome for outcome in outcomes if outcome.status != "ok"), None)
    if failed is None:
        record = supervision.record(status="ok", values=outcomes[1].result)
    else:
        record = supervision.record(status=failed.status, reason=failed.reason)
    write_record(record, path)
    return read_record(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "environment" / "timing" / "512.json"


def history(path: Path) -> list[bytes]:
    return [copy.read_bytes() for copy in sorted((path.parents[2] / "history").rglob("*.json"))]


def assert_no_number(record: Record, reason: str) -> None:
    assert record.status == "error"
    assert reason in str(record.reason)
    assert "latency_ms" not in record.values


def test_a_gpu_that_is_taken_away_between_two_jobs(nvml: StandInNvml, path: Path) -> None:
    first = measure(path, spec())
    assert (first.status, first.reason) == ("ok", None)
    kept = history(path)
    planned = spec()

    nvml.gpus.clear()
    assert_no_number(
        measure(path, planned),
        "device = cuda: NVML finds no NVIDIA GPU on this machine: CUDA_VISIBLE_DEVICES=GPU-aaaa lets none"
        " through that NVML knows of (allowed here: device: cpu, or auto)",
    )
    assert set(kept) < set(history(path))

    nvml.gpus.append(GPU)
    again = measure(path, planned)
    assert again.status == "ok"
    assert again.values["latency_ms"] > 0


def test_a_gpu_that_is_hidden_between_two_jobs(
    nvml: StandInNvml, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batch system does with the variable, once the allocation is over."""
    planned = spec()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert_no_number(measure(path, planned), "CUDA_VISIBLE_DEVICES= lets none through that NVML knows of")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    assert measure(path, planned).status == "ok"


def test_a_gpu_that_falls_off_the_bus_while_samples_are_taken(nvml: StandInNvml, path: Path) -> None:
    """NVML and CUDA both say so; what NVML says when it is closed must not hide CUDA's reason."""
    kept = history(path)

    def fall_off() -> None:
        def lost(*arguments: Any) -> Any:
            raise NVMLError("GPU is lost")

        for function in vars(StandInNvml):
            if function.startswith("nvml"):
                setattr(nvml, function, lost)
        raise RuntimeError("CUDA error: the launch timed out and was terminated")

    record = measure(path, spec(), fall_off)
    assert_no_number(record, "RuntimeError: CUDA error: the launch timed out and was terminated")
    assert record.samples == {}
    assert set(kept) < set(history(path))
    assert measure(path, spec()).status == "ok"


def test_another_gpu_in_its_place_is_not_measured_under_its_name(nvml: StandInNvml, path: Path) -> None:
    planned = spec()
    nvml.gpus[0] = (UUID, "NVIDIA A100-SXM4-80GB")
    record = measure(path, planned)
    assert_no_number(record, "the job is for environment nvidia-h200_driver580.65_")
    assert "this machine is nvidia-a100-sxm4-80gb_driver580.65_" in str(record.reason)
    nvml.gpus[0] = GPU
    assert measure(path, planned).status == "ok"


def test_a_driver_that_was_updated_under_a_run_is_another_environment(nvml: StandInNvml, path: Path) -> None:
    planned = spec()
    nvml.driver = "595.10"
    assert_no_number(measure(path, planned), "this machine is nvidia-h200_driver595.10_")
    nvml.driver = "580.65.06"
    assert measure(path, planned).status == "ok"


# ---- NVML ----

REFUSALS = ("Insufficient Permissions", "NVML Shared Library Not Found", "Driver/library version mismatch")


@pytest.mark.parametrize("refusal", REFUSALS)
def test_nvml_that_does_not_start_is_named_as_the_reason(
    nvml: StandInNvml, path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    planned = spec()

    def refuse() -> None:
        raise NVMLError(refusal)

    with monkeypatch.context() as patch:
        patch.setattr(nvml, "nvmlInit", refuse)
        assert_no_number(
            measure(path, planned),
            f"NVML finds no NVIDIA GPU on this machine: NVML does not start: {refusal}"
            " (allowed here: device: cpu, or auto)",
        )
    assert measure(path, planned).status == "ok"


@pytest.mark.parametrize("asked", ["nvmlDeviceGetCount", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"])
def test_nvml_without_permission_for_the_device_is_named_as_the_reason(
    nvml: StandInNvml, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise NVMLError("Insufficient Permissions")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with monkeypatch.context() as patch:
        patch.setattr(nvml, asked, refuse)
        find_gpus.cache_clear()
        with pytest.raises(EnvironmentFault, match="NVML does not answer: Insufficient Permissions"):
            require_gpu()
        assert nvml.opened == 0
    find_gpus.cache_clear()
    assert require_gpu().uuid == UUID


def test_without_its_package_nvml_is_said_to_be_missing(
    nvml: StandInNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    find_gpus.cache_clear()
    with pytest.raises(EnvironmentFault, match="the package nvidia-ml-py is not installed"):
        require_gpu()


def test_auto_says_so_where_it_takes_the_cpu_beside_an_nvidia_driver(
    nvml: StandInNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "nvidiactl")
    find_gpus.cache_clear()
    assert choose_device("auto") == "cpu"
    assert capsys.readouterr().err == ""  # a machine without a driver has nothing to say
    (tmp_path / "nvidiactl").touch()
    assert choose_device("auto") == "cpu"
    assert capsys.readouterr().err == (
        "device: auto takes the CPU, though there is an NVIDIA driver here:"
        " NVML does not start: Driver/library version mismatch\n"
    )


def test_a_monitor_that_nvml_stops_answering_makes_nothing_up(nvml: StandInNvml) -> None:
    nvml.readings = {name: [value, None] for name, value in (("clock", 1980), ("temperature", 40))}
    nvml.readings |= {"power": [None], "reasons": [None]}
    with GpuMonitor(UUID) as monitor:
        pass
    summary = monitor.summary()
    assert (summary["sm_clock_mhz_min"], summary["sm_clock_mhz_max"]) == (1980, 1980)
    assert summary["monitor_readings"] == 1
    assert summary["power_w_max"] is None


# ---- nvidia-smi: more of it in tests/harness/test_clocks.py ----


def test_a_lock_that_nvidia_smi_reports_and_the_gpu_does_not_keep_is_said(
    nvml: StandInNvml, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-lgc ends with 0; what is read back is another clock; -rgc fails, and the next job undoes it."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\ncase "$*" in *-rgc*) exit "$UNDOING";; esac\n')
    smi.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    monkeypatch.setenv("UNDOING", "15")
    nvml.readings["clock"] = [1200]
    asked = {**spec(), "lock_sm_clock_mhz": 1500}
    record = measure(path, asked)
    assert (record.status, record.marks) == ("ok", ["clock_not_locked"])
    assert record.values["clock_lock_reason"] == (
        "nvidia-smi locked it at 1500 MHz, but it never exceeded 1200 MHz"
    )
    assert "locked_sm_clock_mhz" not in record.values
    assert clocks.marker_of(UUID).exists()

    monkeypatch.setenv("UNDOING", "0")
    nvml.readings["clock"] = [1500]
    record = measure(path, asked)
    assert (record.status, record.marks) == ("ok", [])
    assert record.values["locked_sm_clock_mhz"] == 1500
    assert not clocks.marker_of(UUID).exists()
    lock, undo = f"-i {UUID} -lgc 1500,1500", f"-i {UUID} -rgc"
    # The keeper tried, and the job once more; then the next job, before its own lock.
    assert calls.read_text().splitlines() == [lock, undo, undo, undo, lock, undo]
