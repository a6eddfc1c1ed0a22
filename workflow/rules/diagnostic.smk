"""Why does SDPA's latency differ from run to run? Asked on request only: `snakemake sdpa_diagnostic`."""


localrules:
    render_sdpa_diagnostic,
    sdpa_diagnostic,


rule diagnose_sdpa:
    input:
        script=ancient(ROOT / SCRIPTS[DIAGNOSTIC]),
        environment=ancient(PLAN.environment_file),
    output:
        f"{PLAN.folder}/{DIAGNOSTIC}/{{backend}}/{{priming}}.json",
    log:
        f"logs/{PLAN.environment}/{DIAGNOSTIC}/{{backend}}/{{priming}}.log",
    wildcard_constraints:
        backend="|".join(DIAGNOSTIC_BACKENDS),
        priming="|".join(DIAGNOSTIC_PRIMINGS),
    priority: in_random_order(2)
    conda:
        "../envs/attention.yaml"
    resources:
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
        kept_gpu=0,
    params:
        spec=diagnostic_spec,
    message:
        "diagnose SDPA's backend {wildcards.backend}, {wildcards.priming}"
    shell:
        "python {input.script:q} --spec {params.spec:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} --kept-gpu {resources.kept_gpu} > {log:q} 2>&1"


rule render_sdpa_diagnostic:
    input:
        script=ancient(ROOT / "workflow/scripts/render_sdpa_diagnostic.py"),
        environment=PLAN.environment_file,
        records=diagnostic_records,
    output:
        page="report/sdpa_diagnostic.md",
        figure="report/figures/sdpa_diagnostic.svg",
    log:
        "logs/render_sdpa_diagnostic.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
        source=source_digest(ROOT / "workflow/scripts/render_sdpa_diagnostic.py", ROOT),
    message:
        "write the page of the SDPA diagnostic"
    shell:
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --environment-file {input.environment:q}"
        " --page {output.page:q} --figure {output.figure:q} > {log:q} 2>&1"


rule sdpa_diagnostic:
    input:
        script=ancient(ROOT / "workflow/scripts/render_sdpa_diagnostic.py"),
        page="report/sdpa_diagnostic.md",
        figure="report/figures/sdpa_diagnostic.svg",
        environment=ancient(PLAN.environment_file),
    log:
        "logs/sdpa_diagnostic.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
    message:
        "what the SDPA diagnostic found ({input.page})"
    shell:
        # Its standard output is for the person; it ends non-zero where a measurement is an error.
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --environment-file {input.environment:q} 2> {log:q}"
