"""How fast is each implementation, and how much memory does it take? One job per cell and question.

Right comes before fast by `priority` alone. The grid's records must not be inputs here, not even as
`ancient`: Snakemake does not look at the params of a job while a job before it is to run, so an edit
that changes both would leave the old timings standing.
"""


rule measure_roofline:
    input:
        script=ancient(ROOT / SCRIPTS[ROOFLINE]),
        environment=ancient(PLAN.environment_file),
    output:
        PLAN.roofline_job().path,
    log:
        f"logs/{PLAN.environment}/{ROOFLINE}.log",
    priority: 4
    conda:
        "../envs/attention.yaml"
    resources:
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
    params:
        spec=canonical_json(PLAN.roofline_job().spec),
    message:
        "measure what this machine can do"
    shell:
        "python {input.script:q} --spec {params.spec:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} > {log:q} 2>&1"


rule measure_timing:
    input:
        script=ancient(ROOT / SCRIPTS[TIMING]),
        kernel=ancient(kernel_source),
        environment=ancient(PLAN.environment_file),
        tuned=tuned_options,
    output:
        f"{PLAN.folder}/{TIMING}/{{sweep}}/{{implementation}}/{{seq_len}}.json",
    log:
        f"logs/{PLAN.environment}/{TIMING}/{{sweep}}/{{implementation}}/{{seq_len}}.log",
    priority: in_random_order(2)
    conda:
        "../envs/attention.yaml"
    resources:
        **KEPT_GPUS,
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
        kept_gpu=kept_gpu,
    params:
        spec=sweep_spec(TIMING),
    message:
        "time {wildcards.implementation} at seq_len {wildcards.seq_len} (sweep {wildcards.sweep})"
    shell:
        "python {input.script:q} --spec {params.spec:q} --tuned {input.tuned:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} --kept-gpu {resources.kept_gpu} > {log:q} 2>&1"


rule measure_memory:
    input:
        script=ancient(ROOT / SCRIPTS[MEMORY]),
        kernel=ancient(kernel_source),
        environment=ancient(PLAN.environment_file),
        tuned=tuned_options,
    output:
        f"{PLAN.folder}/{MEMORY}/{{sweep}}/{{implementation}}/{{seq_len}}.json",
    log:
        f"logs/{PLAN.environment}/{MEMORY}/{{sweep}}/{{implementation}}/{{seq_len}}.log",
    priority: 1
    conda:
        "../envs/attention.yaml"
    resources:
        **KEPT_GPUS,
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
        kept_gpu=kept_gpu,
    params:
        spec=sweep_spec(MEMORY),
    message:
        "measure memory of {wildcards.implementation} at seq_len {wildcards.seq_len} (sweep {wildcards.sweep})"
    shell:
        "python {input.script:q} --spec {params.spec:q} --tuned {input.tuned:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} --kept-gpu {resources.kept_gpu} > {log:q} 2>&1"
