"""What the numbers are measured on.

`environment_key` is cheap (no torch): it names the folder that an environment's results lie in.
`describe` is the full account, taken where torch is loaded anyway.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Nothing else of the process environment is recorded: variables can hold secrets.
RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_PATH",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_ALWAYS_COMPILE",
    "TRITON_DISABLE_LINE_INFO",
)
RECORDED_PACKAGES = (
    "torch",
    "triton",
    "snakemake",
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "tabulate",
    "nvidia-ml-py",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "fa3-fwd",
)
STATED_COMMIT_VARIABLE = "STATED_COMMIT"
DRIVER = Path("/dev/nvidiactl")  # what every use of an NVIDIA GPU begins with


class EnvironmentFault(Exception):
    """The machine is not what the configuration asks for; the message is one line for a person."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use, or a MIG slice of one.

    `card_uuid` is the physical GPU's, which slices of one GPU have in common, and with it clock and power.
    """

    uuid: str
    name: str
    driver: str
    card_uuid: str


@functools.cache  # starting NVML takes a while, and a Snakefile asks more than once
def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES lets through, in its order, by NVML and without CUDA.

    A GPU that is divided (MIG) counts as its slices. A process in which the variable is changed, or which is
    to look anew, calls `find_gpus.cache_clear()`.
    """
    found = _search()
    return () if isinstance(found, str) else found


def find_gpu() -> Gpu | None:
    """The first visible GPU; None where there is none."""
    return next(iter(find_gpus()), None)


def _search() -> tuple[Gpu, ...] | str:
    """The visible GPUs, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as fault:
        return f"NVML does not start: {fault}"
    try:
        return tuple(_visible(pynvml)) or _nothing_visible()
    except pynvml.NVMLError as fault:
        return f"NVML does not answer: {fault}"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nothing_visible() -> str:
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return "NVML knows of none"
    return f"CUDA_VISIBLE_DEVICES={wanted} lets none through that NVML knows of"


def _visible(pynvml: Any) -> list[Gpu]:
    """The GPUs behind each entry of the variable; as in CUDA, the first that there is not ends the list."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.nvmlDeviceGetCount()
    entries = [str(index) for index in range(count)] if wanted is None else wanted.split(",")
    found: dict[str, Gpu] = {}
    for entry in entries:
        gpus = _of_entry(pynvml, entry.strip(), count)
        if not gpus:
            break
        found |= {gpu.uuid: gpu for gpu in gpus}
    return list(found.values())


def _of_entry(pynvml: Any, entry: str, count: int) -> list[Gpu]:
    """The GPU, or its slices, that an index, a UUID or the beginning of one names; none if there is none."""
    if entry.isdecimal():
        return _with_slices(pynvml, int(entry)) if int(entry) < count else []
    if entry.startswith("MIG-"):
        handles = [_handle(pynvml, entry)]
        gpus = [_described(pynvml, handle) for handle in handles if handle is not None]
        return gpus or _only([gpu for index in range(count) for gpu in _with_slices(pynvml, index)], entry)
    if entry.startswith("GPU-"):
        cards = [_described(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        named = _only(cards, entry)
        return _with_slices(pynvml, cards.index(named[0])) if named else []
    return []


def _only(gpus: list[Gpu], beginning: str) -> list[Gpu]:
    """The one GPU whose UUID begins like this, if it is one."""
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(beginning)]
    return matching if len(matching) == 1 else []


def _handle(pynvml: Any, uuid: str) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def _with_slices(pynvml: Any, index: int) -> list[Gpu]:
    """The MIG slices of the GPU with this index, or the GPU itself where it is not divided."""
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        divided = bool(pynvml.nvmlDeviceGetMigMode(card)[0])
    except pynvml.NVMLError:  # a GPU that cannot be
        divided = False
    if not divided:
        return [_described(pynvml, card)]
    slices = []
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with contextlib.suppress(pynvml.NVMLError):  # a place that is not taken
            slices.append(_described(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)))
    return slices


def _described(pynvml: Any, handle: Any) -> Gpu:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    card = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if uuid.startswith("MIG-") else handle
    return Gpu(
        uuid=uuid,
        name=pynvml.nvmlDeviceGetName(handle),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        card_uuid=pynvml.nvmlDeviceGetUUID(card),
    )


def choose_device(wanted: str) -> str:
    """ "cuda" or "cpu" for the config's `device`: auto takes the GPU if there is one and torch can use it.

    Says so on stderr where auto takes the CPU although the machine has an NVIDIA driver.
    """
    if wanted != "auto":
        return wanted
    if find_gpu() is not None and "+cpu" not in _version("torch"):
        return "cuda"
    if DRIVER.exists():
        why = _search() if find_gpu() is None else f"torch {_version('torch')} is a build without CUDA"
        print(f"device: auto takes the CPU, though there is an NVIDIA driver here: {why}", file=sys.stderr)
    return "cpu"


def environment_key(device: str, gpu: Gpu | None = None) -> str:
    """The name of the environment, which is a folder name: device, driver, torch, triton, Python.

    The driver counts to its minor number. For `cuda` it is that of `gpu`, or of the first visible one; on a
    machine without a GPU the key says so.
    """
    if device == "cuda":
        gpu = gpu or find_gpu()
        machine = (
            "no-gpu" if gpu is None else f"{_slug(gpu.name)}_driver{'.'.join(gpu.driver.split('.')[:2])}"
        )
    else:
        machine = f"cpu-{_slug(cpu_name())}-{len(os.sched_getaffinity(0))}-threads"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"{machine}_torch{_version('torch')}_triton{_version('triton')}_{python}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cpu_name() -> str:
    """The processor's name as Linux gives it, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def source_state(root: Path) -> dict[str, Any]:
    """The git commit of the checkout and whether its tree is dirty.

    Where there is no git repository the commit is what the variable STATED_COMMIT says, and
    `commit_source` says that it was stated and not found.
    """
    git = ["git", "-C", str(root), "-c", "safe.directory=*"]
    try:
        found = subprocess.run(
            [*git, "rev-parse", "HEAD", "--show-toplevel"], capture_output=True, timeout=20
        )
        commit, _, top = os.fsdecode(found.stdout).strip().partition("\n")
        # A repository that the checkout was only unpacked into says nothing about it.
        if found.returncode == 0 and Path(top).resolve() == root.resolve():
            status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, timeout=20)
            dirty = bool(status.stdout.strip()) if status.returncode == 0 else None
            return {"commit": commit, "dirty": dirty, "commit_source": "git"}
    except (OSError, subprocess.TimeoutExpired):
        pass
    stated = os.environ.get(STATED_COMMIT_VARIABLE)
    return {"commit": stated, "dirty": None, "commit_source": "stated" if stated else "unknown"}


def use_every_cpu_thread() -> None:
    """Let torch use each CPU that this process may run on.

    Snakemake limits OMP_NUM_THREADS to a rule's threads; a job by hand must measure the same.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def describe(device: str, root: Path) -> dict[str, Any]:
    """Everything about the machine and the software that a number may depend on.

    Needs no rights. Imports torch, and initialises CUDA for `cuda`. Raises EnvironmentFault, in one
    line, when `cuda` is asked for and cannot be had.
    """
    import torch

    account: dict[str, Any] = {
        "device": device,
        "key": environment_key(device),
        "os": _operating_system(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cpu_threads_visible": len(os.sched_getaffinity(0)),
        "cpu_threads_torch": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "reduced_precision_reduction": {
            "fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        },
        "packages": {name: _version(name) for name in RECORDED_PACKAGES if _version(name) != "none"},
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        "source": source_state(root),
    }
    if device == "cuda":
        account["gpu"] = _describe_gpu()
    return account


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def require_gpu() -> Gpu:
    """The GPU to measure on; raises EnvironmentFault, in one line, if there is none torch can use."""
    gpu = find_gpu()
    if gpu is None:
        raise EnvironmentFault(
            f"device = cuda: NVML finds no NVIDIA GPU on this machine: {_search()}"
            " (allowed here: device: cpu, or auto)"
        )
    if "+cpu" in _version("torch"):
        raise EnvironmentFault(f"device = cuda: torch {_version('torch')} is a build without CUDA")
    return gpu


def gpus_of(environment: str) -> list[Gpu]:
    """The visible GPUs whose environment has this key; where none has, the first, which is then told so.

    Raises EnvironmentFault, in one line, if there is none torch can use.
    """
    first = require_gpu()
    return [gpu for gpu in find_gpus() if environment_key("cuda", gpu) == environment] or [first]


def _describe_gpu() -> dict[str, Any]:
    import torch

    gpu = require_gpu()
    if not torch.cuda.is_available():
        raise EnvironmentFault(f"device = cuda: torch {torch.__version__} cannot use the {gpu.name}")
    properties = torch.cuda.get_device_properties(0)
    account: dict[str, Any] = {
        "name": gpu.name,
        "uuid": gpu.uuid,
        "driver": gpu.driver,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    account.update(_nvml_state(gpu.uuid))
    return account


def _nvml_state(uuid: str) -> dict[str, Any]:
    """Clocks (MHz), power limit (W), ECC, MIG and persistence mode; None where NVML does not say."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def ask(function: str, *arguments: Any) -> Any:
            try:
                return getattr(pynvml, function)(handle, *arguments)
            except pynvml.NVMLError:
                return None

        power_limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
        return {
            "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            "memory_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
            "power_limit_w": None if power_limit is None else power_limit / 1000,
            "ecc": None if ecc is None else bool(ecc[0]),
            "mig": None if mig is None else bool(mig[0]),
            "persistence_mode": _flag(ask("nvmlDeviceGetPersistenceMode")),
        }
    finally:
        pynvml.nvmlShutdown()


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)
