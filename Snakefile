import platform
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT))

from workflow.progress import show_progress
from workflow.session import use_this_python

use_this_python()


include: "workflow/rules/common.smk"
include: "workflow/rules/environment.smk"
include: "workflow/rules/correctness.smk"
include: "workflow/rules/tuning.smk"
include: "workflow/rules/benchmark.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/collect.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/publish.smk"
include: "workflow/rules/diagnostic.smk"


if A_RUN:
    show_progress(workflow)


localrules:
    all,
    correctness,
    timing,
    tuning,
    memory,


rule all:
    default_target: True
    input:
        "report/benchmark.md",
        "report/report.md",
        FIGURES,
        "results/benchmark.csv",
        "results/correctness.csv",
        "results/comparison.csv",
        "results/goals.csv",
        "results/verdict.txt",


rule correctness:
    input:
        records(CORRECTNESS),


rule timing:
    input:
        records(TIMING),


rule memory:
    input:
        records(MEMORY),


rule tuning:
    input:
        records(TUNING),
