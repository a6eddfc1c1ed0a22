"""What the rules share: the checked configuration, the plan of the run, and the GPU's limit."""

import math

from harness.clocks import undo_leftover_if_free
from harness.digest import source_digest
from harness.environment import choose_device, environment_key, find_gpus
from harness.forkserver import ForkServer
from harness.problem import WORKLOADS
from harness.record import canonical_json, spec_digest
from workflow.config import ConfigError, load_config
from workflow.plan import (
    CORRECTNESS,
    DIAGNOSTIC,
    DIAGNOSTIC_BACKENDS,
    DIAGNOSTIC_PRIMINGS,
    MEMORY,
    ROOFLINE,
    SCRIPTS,
    TIMING,
    TUNING,
    Plan,
)
from workflow.profiling import up_to_date
from workflow.session import (
    begin_run,
    in_random_order,
    only_looks,
    renew_environment,
    require_environment,
    workflow_profile,
)
from workflow.tables import stale_records

if sys.platform != "linux" or platform.machine() != "x86_64":
    sys.exit(
        f"This workflow runs on Linux x86-64, not on {platform.system()} {platform.machine()}."
    )

# One config file is one study: another one replaces the default, and is not merged into it.
if not workflow.configfiles:

    configfile: "config/config.yaml"


try:
    CONFIG = load_config(config, ROOT / "kernels")
except ConfigError as fault:
    sys.exit(str(fault))

# A look (-n, --lint) disturbs nobody.
A_RUN = workflow.is_main_process and not only_looks(sys.argv[1:])
if A_RUN:
    begin_run(Path.cwd())

DEVICE = choose_device(CONFIG["device"])
# Where the environment is stated this machine is not the one that measures, and decides nothing.
STATED = CONFIG["environment"]
PLAN = Plan(CONFIG, DEVICE, STATED or environment_key(DEVICE), ROOT)
NOT_STATED = (
    "The jobs run on other machines than Snakemake: say which environment theirs is (device and"
    " environment in the configuration, docs/cluster.md)."
)
if workflow.remote_exec and not STATED:
    sys.exit(NOT_STATED)

CAPTURE_ENVIRONMENT = [
    *(sys.executable, str(ROOT / "workflow/scripts/capture_environment.py")),
    *("--device", DEVICE, "--key", PLAN.environment),
    *("--output", PLAN.environment_file),
]
if A_RUN and STATED:
    require_environment(Path(PLAN.environment_file), CAPTURE_ENVIRONMENT)
elif A_RUN:
    renew_environment(Path(PLAN.environment_file), CAPTURE_ENVIRONMENT)

# A job that was killed may have left the GPU's clock locked; this run may have no job that would see it.
GPUS_HERE = find_gpus() if DEVICE == "cuda" and not STATED else ()
if A_RUN:
    for card_uuid in {gpu.card_uuid for gpu in GPUS_HERE}:
        undo_leftover_if_free(card_uuid)

# Snakemake compares specs by its own notes in .snakemake/, which may be lost; the records tell theirs.
STALE = stale_records(PLAN, Path.cwd()) if workflow.is_main_process else []

TIME_LIMIT_S = math.ceil(CONFIG["time_limit_s"])
# Where rows of a sweep are to keep to one GPU, the sweeps take those of this environment in turn.
KEPT = [
    gpu
    for gpu in (GPUS_HERE if CONFIG["one_gpu_per_sweep"] else ())
    if environment_key(DEVICE, gpu) == PLAN.environment
]
# What a measurement takes: a GPU, which a batch system is asked for, or the CPU as a whole. Checks may
# share a CPU, but never a GPU.
GPUS = 1 if DEVICE == "cuda" else 0
WHOLE_CPUS = 1 - GPUS

# Torch is imported once for all jobs of a run; `onstart` starts the server, on this machine only.
# (Where Triton is to interpret its kernels it must be told so before it is imported: not here.)
FORK_SERVER = ForkServer(
    ROOT, ["torch", "harness.triton_ready"] if DEVICE == "cuda" else ["torch"]
)


onstart:
    if workflow.local_exec:
        FORK_SERVER.start()
    elif not STATED:
        sys.exit(NOT_STATED)


onsuccess:
    FORK_SERVER.stop()


onerror:
    FORK_SERVER.stop()


# Without a limit Snakemake would start measurements side by side, each waiting for the device's lock.
for resource in ("gpu", "whole_cpu"):
    if resource not in workflow.global_resources:
        workflow.register_resource(resource, 1)


def place_of_kept_gpu(sweep):
    """The place of the sweep's GPU among all; any GPU (-1) where its rows need not keep to one."""
    return list(CONFIG["sweeps"]).index(sweep) if CONFIG["one_gpu_per_sweep"] else -1


def kept_gpu(wildcards):
    return place_of_kept_gpu(wildcards.sweep)


def takes_kept_gpu(place):
    """How many of the GPU at this place a job of a sweep takes: it, or none."""
    return lambda wildcards: int(kept_gpu(wildcards) % len(KEPT) == place)


# Jobs that would wait for each other, since they keep to one GPU, are not started side by side.
KEPT_GPUS = {f"kept_gpu_{place}": takes_kept_gpu(place) for place in range(len(KEPT))}
for resource in KEPT_GPUS:
    workflow.register_resource(resource, 1)


wildcard_constraints:
    implementation="|".join(CONFIG["implementations"]),
    sweep="|".join(CONFIG["sweeps"]),
    workload="|".join(WORKLOADS),
    seq_len=r"\d+",
    tuned=r"[a-z0-9_]+(-[0-9a-f]+)?",


def grid_spec(wildcards):
    return canonical_json(
        PLAN.grid_job(
            wildcards.workload, wildcards.implementation, int(wildcards.seq_len)
        ).spec
    )


def sweep_spec(phase):
    """The params function of a phase: Snakemake runs a job again when its spec has changed."""

    def spec(wildcards):
        return canonical_json(
            PLAN.sweep_job(
                phase, wildcards.sweep, wildcards.implementation, int(wildcards.seq_len)
            ).spec
        )

    return spec


def tuning_spec(wildcards):
    return canonical_json(
        PLAN.tuning_job(wildcards.sweep, wildcards.tuned, int(wildcards.seq_len)).spec
    )


def tuned_options(wildcards):
    """The file that says which launch options won, for implementations that are tuned."""
    winner = PLAN.winner_file(
        wildcards.sweep, wildcards.implementation, int(wildcards.seq_len)
    )
    return [] if winner is None else winner


def measure_stale_again():
    """Have the stale records measured again that the targets ask for; from an input function, not earlier."""
    workflow.dag.forcefiles.update(STALE)


def tuned_kernel_source(wildcards):
    measure_stale_again()
    return f"{ROOT}/kernels/{wildcards.tuned.split('-')[0]}.py"


def records(*phases):
    """The records of every job of these phases that the configuration asks for."""
    return [job.path for job in PLAN.jobs() if job.phase in phases]


def kernel_source(wildcards):
    measure_stale_again()
    return f"{ROOT}/kernels/{CONFIG['implementations'][wildcards.implementation]['kernel']}.py"


def config_name():
    """The name a run is published under: its config file's, and `default` for config/config.yaml."""
    stem = Path(workflow.configfiles[0]).stem
    return "default" if stem == "config" else stem


def diagnostic_records(wildcards):
    """All records of the diagnostic; those that are stale or not there are measured again."""
    return up_to_date(PLAN.diagnostic_jobs(), Path.cwd(), workflow.dag.forcefiles)


def diagnostic_spec(wildcards):
    return canonical_json(
        PLAN.diagnostic_job(wildcards.backend, wildcards.priming).spec
    )
