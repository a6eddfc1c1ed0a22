"""The account of the machine is complete, tells nothing private, and picks the GPU that is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from harness import environment
from harness.environment import (
    RECORDED_VARIABLES,
    STATED_COMMIT_VARIABLE,
    EnvironmentFault,
    choose_device,
    describe,
    environment_key,
    find_gpu,
    find_gpus,
    require_gpu,
    source_state,
)

ROOT = Path(__file__).parents[2]
H200 = ("GPU-aaaa", "NVIDIA H200")
T4 = ("GPU-bbbb", "Tesla T4")
InstallNvml = Callable[..., object]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_key_names_what_numbers_depend_on_and_is_a_folder_name() -> None:
    key = environment_key("cpu")
    assert key.startswith("cpu-")
    assert f"_torch{torch.__version__}_" in key
    assert f"_triton{metadata.version('triton')}_" in key
    assert key.endswith(f"_python{sys.version_info.major}.{sys.version_info.minor}")
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", key)
    assert f"-{len(os.sched_getaffinity(0))}-threads" in key


def test_the_key_of_a_gpu_counts_the_driver_to_its_minor_number(install_nvml: InstallNvml) -> None:
    install_nvml(H200, driver="580.65.06")
    first = environment_key("cuda")
    assert first.startswith("nvidia-h200_driver580.65_torch")
    install_nvml(H200, driver="580.65.99")
    assert environment_key("cuda") == first
    install_nvml(H200, driver="580.82.01")
    assert environment_key("cuda") != first


def test_the_key_says_that_there_is_no_gpu(install_nvml: InstallNvml) -> None:
    install_nvml()
    assert environment_key("cuda").startswith("no-gpu_torch")


def test_the_key_needs_no_torch() -> None:
    code = (
        "import sys; from harness.environment import choose_device, environment_key;"
        "environment_key(choose_device('auto')); sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_same_machine_is_described_under_its_key() -> None:
    account = describe("cpu", ROOT)
    assert account["key"] == environment_key("cpu")
    assert account["torch"] == torch.__version__
    assert account["cpu_threads_torch"] == torch.get_num_threads()
    assert account["packages"]["torch"] == metadata.version("torch")
    json.dumps(account, allow_nan=False)


def test_only_variables_on_the_list_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-very-secret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    account = describe("cpu", ROOT)
    assert account["variables"]["OMP_NUM_THREADS"] == "3"
    assert set(account["variables"]) <= set(RECORDED_VARIABLES)
    text = json.dumps(account)
    assert "a-very-secret-value" not in text
    assert "AWS_SECRET" not in text
    for name in ("USER", "HOME", "PATH", "HOSTNAME"):
        assert name not in account["variables"]


def test_the_commit_is_that_of_the_checkout_and_a_dirty_tree_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert source_state(tmp_path) == {"commit": head, "dirty": False, "commit_source": "git"}
    (tmp_path / "file").write_text("two")
    assert source_state(tmp_path)["dirty"] is True


def test_without_git_the_commit_is_stated_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATED_COMMIT_VARIABLE, "abc123")
    assert source_state(tmp_path) == {"commit": "abc123", "dirty": None, "commit_source": "stated"}
    monkeypatch.delenv(STATED_COMMIT_VARIABLE)
    assert source_state(tmp_path) == {"commit": None, "dirty": None, "commit_source": "unknown"}


def test_the_commit_of_a_repository_around_the_checkout_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STATED_COMMIT_VARIABLE, raising=False)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "another project's")
    unpacked = tmp_path / "attention-bench"
    unpacked.mkdir()
    assert source_state(unpacked)["commit"] is None


def test_a_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(STATED_COMMIT_VARIABLE, "abc123")
    assert source_state(ROOT)["commit_source"] == "stated"


def test_the_device_asked_for_is_taken(install_nvml: InstallNvml) -> None:
    install_nvml(H200)
    assert choose_device("cuda") == "cuda"
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("gpus", "version", "device"),
    [
        ([H200], "2.11.0+cu130", "cuda"),
        ([H200], "2.11.0", "cuda"),
        ([H200], "2.13.0+cpu", "cpu"),
        ([], "2.11.0+cu130", "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_torch_can_use(
    install_nvml: InstallNvml,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[tuple[str, str]],
    version: str,
    device: str,
) -> None:
    install_nvml(*gpus)
    monkeypatch.setattr(environment, "_version", lambda package: version)
    assert choose_device("auto") == device


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "NVIDIA H200"),
        ("0", "NVIDIA H200"),
        ("1", "Tesla T4"),
        ("1,0", "Tesla T4"),
        (" 1 , 0", "Tesla T4"),
        ("GPU-bbbb", "Tesla T4"),
        ("GPU-bbbb,GPU-aaaa", "Tesla T4"),
        ("", None),
        ("-1", None),
        ("-1,0", None),
        ("2", None),
        ("GPU-cccc", None),
        ("NoDevFiles", None),
    ],
)
def test_the_gpu_is_the_first_that_cuda_would_see(
    install_nvml: InstallNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str | None
) -> None:
    nvml = install_nvml(H200, T4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = find_gpu()
    assert (gpu.name if gpu else None) == name
    assert nvml.opened == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-bbcc"]),
        ("2,0", ["GPU-bbcc", "GPU-aaaa"]),
        ("GPU-bbbb,0,GPU-bbbb", ["GPU-bbbb", "GPU-aaaa"]),
        ("1,7,0", ["GPU-bbbb"]),  # CUDA reads no further than the first that there is not
        ("GPU-a", ["GPU-aaaa"]),
        ("GPU-bb", []),  # the beginning of two
        ("²", []),  # a digit, and no number
        ("-1", []),
    ],
)
def test_all_gpus_that_cuda_would_see_are_found_in_its_order(
    install_nvml: InstallNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]
) -> None:
    install_nvml(H200, T4, ("GPU-bbcc", "NVIDIA H200"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in find_gpus()] == uuids


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["MIG-a0", "MIG-a1", "GPU-bbbb"]),
        ("0", ["MIG-a0", "MIG-a1"]),
        ("GPU-aaaa", ["MIG-a0", "MIG-a1"]),
        ("MIG-a1", ["MIG-a1"]),
        ("MIG-a1,1", ["MIG-a1", "GPU-bbbb"]),
        ("MIG-a", []),  # the beginning of two
    ],
)
def test_a_gpu_that_is_divided_counts_as_its_slices(
    install_nvml: InstallNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]
) -> None:
    nvml = install_nvml(H200, T4)
    nvml.slices = {  # type: ignore[attr-defined]
        "GPU-aaaa": [("MIG-a0", "NVIDIA H200 MIG 1g.18gb"), None, ("MIG-a1", "NVIDIA H200 MIG 2g.35gb")]
    }
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in find_gpus()] == uuids
    assert {gpu.card_uuid for gpu in find_gpus() if gpu.uuid.startswith("MIG-")} <= {"GPU-aaaa"}


def test_a_gpu_is_told_by_its_uuid_and_driver(install_nvml: InstallNvml) -> None:
    install_nvml(T4, driver="535.1.2")
    assert find_gpu() == environment.Gpu("GPU-bbbb", "Tesla T4", "535.1.2", card_uuid="GPU-bbbb")


def test_a_machine_without_a_gpu_is_told_so_in_one_line(install_nvml: InstallNvml) -> None:
    install_nvml()
    with pytest.raises(EnvironmentFault) as caught:
        require_gpu()
    assert str(caught.value).startswith("device = cuda: NVML finds no NVIDIA GPU")
    assert "\n" not in str(caught.value)


def test_a_torch_without_cuda_is_told_so_in_one_line(
    install_nvml: InstallNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(H200)
    monkeypatch.setattr(environment, "_version", lambda package: "2.13.0+cpu")
    for ask in (require_gpu, lambda: describe("cuda", ROOT)):
        with pytest.raises(EnvironmentFault) as caught:
            ask()
        assert str(caught.value) == "device = cuda: torch 2.13.0+cpu is a build without CUDA"


def test_the_flags_that_change_precision_are_described() -> None:
    before = describe("cpu", ROOT)
    flag = before["tf32"]["matmul"]
    try:
        torch.backends.cuda.matmul.allow_tf32 = not flag
        after = describe("cpu", ROOT)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = flag
    assert after["tf32"]["matmul"] is not flag
    assert set(before["reduced_precision_reduction"]) == {"fp16", "bf16"}
