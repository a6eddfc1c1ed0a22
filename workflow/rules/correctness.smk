"""Is each implementation right? One job per implementation and seq_len, many cells in each."""


rule check_correctness:
    input:
        # Compared by digest, in the spec: a comment or a new modification time is no change.
        script=ancient(ROOT / SCRIPTS[CORRECTNESS]),
        kernel=ancient(kernel_source),
        environment=ancient(PLAN.environment_file),
    output:
        f"{PLAN.folder}/{CORRECTNESS}/{{workload}}/{{implementation}}/{{seq_len}}.json",
    log:
        f"logs/{PLAN.environment}/{CORRECTNESS}/{{workload}}/{{implementation}}/{{seq_len}}.log",
    priority: 4
    conda:
        "../envs/attention.yaml"
    resources:
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
    params:
        spec=grid_spec,
    message:
        "check {wildcards.workload} of {wildcards.implementation} at seq_len {wildcards.seq_len}"
    shell:
        "python {input.script:q} --spec {params.spec:q} --output {output:q}"
        " --time-limit-s {resources.time_limit_s} > {log:q} 2>&1"
