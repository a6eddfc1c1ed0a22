"""Why is it as fast as it is? Asked on request only: `snakemake static_profile`, `snakemake profile`."""

from workflow.profiling import (
    PROFILE,
    PROFILE_SCRIPTS,
    STATIC_PROFILE,
    counter_job,
    counter_jobs,
    kernel_of,
    seen_on_disk,
    static_job,
    static_jobs,
)


localrules:
    render_static_profile,
    static_profile,
    render_profile,
    profile,


ROOFLINE_FIGURES = [
    f"report/figures/{sweep}_roofline.svg"
    for sweep in CONFIG["sweeps"]
    if PLAN.seq_lens(sweep)
]
PROFILE_RESULTS = [
    "report/tables/static_profile.html",
    "report/tables/limits.html",
    *ROOFLINE_FIGURES,
]


rule profile_statically:
    input:
        script=ancient(ROOT / PROFILE_SCRIPTS[STATIC_PROFILE]),
        kernel=ancient(
            lambda wildcards: f"{ROOT}/kernels/{kernel_of(PLAN, wildcards.sweep, wildcards.tuned)}.py"
        ),
        environment=ancient(PLAN.environment_file),
    output:
        f"{PLAN.folder}/{STATIC_PROFILE}/{{sweep}}/{{tuned}}/{{target}}.json",
    log:
        f"logs/{PLAN.environment}/{STATIC_PROFILE}/{{sweep}}/{{tuned}}/{{target}}.log",
    wildcard_constraints:
        target=r"sm_\d+",
    conda:
        "../envs/attention.yaml"
    resources:
        # It compiles on every CPU there is, side by side: never beside a measurement.
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
    params:
        spec=lambda wildcards: canonical_json(
            static_job(PLAN, wildcards.sweep, wildcards.tuned, wildcards.target).spec
        ),
    message:
        "compile {wildcards.tuned} for {wildcards.target} (sweep {wildcards.sweep})"
    shell:
        "python {input.script:q} --spec {params.spec:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} > {log:q} 2>&1"


rule render_static_profile:
    input:
        script=ancient(ROOT / "workflow/scripts/render_static_profile.py"),
        records=lambda wildcards: up_to_date(
            static_jobs(PLAN), Path.cwd(), workflow.dag.forcefiles
        ),
    output:
        page="report/static_profile.md",
        csv="results/static_profile.csv",
        table=report(
            "report/tables/static_profile.html",
            category="Profile",
            caption="../report/static_profile.rst",
            labels={"what": "static profile, table"},
        ),
    log:
        "logs/render_static_profile.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
        source=source_digest(ROOT / "workflow/scripts/render_static_profile.py", ROOT),
    message:
        "write the static profile"
    shell:
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --page {output.page:q} --csv {output.csv:q}"
        " --table {output.table:q} > {log:q} 2>&1"


rule static_profile:
    input:
        script=ancient(ROOT / "workflow/scripts/render_static_profile.py"),
        page="report/static_profile.md",
    log:
        "logs/static_profile.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
    message:
        "what the static profile found ({input.page})"
    shell:
        # Its standard output is for the person; it ends non-zero where a target could not be compiled.
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} 2> {log:q}"


rule read_counters:
    input:
        script=ancient(ROOT / PROFILE_SCRIPTS[PROFILE]),
        kernel=ancient(kernel_source),
        environment=ancient(PLAN.environment_file),
        tuned=tuned_options,
    output:
        f"{PLAN.folder}/{PROFILE}/{{sweep}}/{{implementation}}/{{seq_len}}.json",
    log:
        f"logs/{PLAN.environment}/{PROFILE}/{{sweep}}/{{implementation}}/{{seq_len}}.log",
    conda:
        "../envs/attention.yaml"
    resources:
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
    params:
        spec=lambda wildcards: canonical_json(
            counter_job(
                PLAN,
                wildcards.sweep,
                wildcards.implementation,
                int(wildcards.seq_len),
            ).spec
        ),
    message:
        "count in {wildcards.implementation} at seq_len {wildcards.seq_len} (sweep {wildcards.sweep})"
    shell:
        "python {input.script:q} --spec {params.spec:q} --tuned {input.tuned:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} > {log:q} 2>&1"


rule render_profile:
    input:
        script=ancient(ROOT / "workflow/scripts/render_profile.py"),
        environment=PLAN.environment_file,
        static=lambda wildcards: up_to_date(
            static_jobs(PLAN), Path.cwd(), workflow.dag.forcefiles
        ),
        counters=lambda wildcards: up_to_date(
            counter_jobs(PLAN), Path.cwd(), workflow.dag.forcefiles
        ),
    output:
        page="report/profile.md",
        table=report(
            "report/tables/limits.html",
            category="Profile",
            caption="../report/limits.rst",
            labels={"what": "what limits it, table"},
        ),
        figures=[
            report(
                path,
                category="Profile",
                caption="../report/roofline.rst",
                labels={"what": f"{Path(path).stem.replace('_', ', ')}, figure"},
            )
            for path in ROOFLINE_FIGURES
        ],
    log:
        "logs/render_profile.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
        source=source_digest(ROOT / "workflow/scripts/render_profile.py", ROOT),
        # What was timed is told where it is there, and is no reason to time it.
        timed=lambda wildcards: seen_on_disk(PLAN, Path.cwd()),
    message:
        "write the profile"
    shell:
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --environment-file {input.environment:q}"
        " --page {output.page:q} --table {output.table:q} --figures {output.figures:q} > {log:q} 2>&1"


rule profile:
    input:
        script=ancient(ROOT / "workflow/scripts/render_profile.py"),
        page="report/profile.md",
        environment=ancient(PLAN.environment_file),
    log:
        "logs/profile.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
    message:
        "what limits each implementation ({input.page})"
    shell:
        # Its standard output is for the person; it ends non-zero where there is an error.
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --environment-file {input.environment:q} 2> {log:q}"
