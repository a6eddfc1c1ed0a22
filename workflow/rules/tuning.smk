"""Which launch options are the fastest? Asked apart from any measurement, and answered for all of them."""


rule tune:
    input:
        script=ancient(ROOT / SCRIPTS[TUNING]),
        kernel=ancient(tuned_kernel_source),
        environment=ancient(PLAN.environment_file),
    output:
        # The winner alone is what the measurements depend on: found again, it measures nothing again.
        winner=f"{PLAN.folder}/{TUNING}/{{sweep}}/{{tuned}}/{{seq_len}}.winner.json",
        record=f"{PLAN.folder}/{TUNING}/{{sweep}}/{{tuned}}/{{seq_len}}.json",
    log:
        f"logs/{PLAN.environment}/{TUNING}/{{sweep}}/{{tuned}}/{{seq_len}}.log",
    priority: 3
    conda:
        "../envs/attention.yaml"
    resources:
        **KEPT_GPUS,
        gpu=GPUS,
        time_limit_s=TIME_LIMIT_S,
        whole_cpu=WHOLE_CPUS,
        kept_gpu=kept_gpu,
    params:
        spec=tuning_spec,
    message:
        "tune {wildcards.tuned} at seq_len {wildcards.seq_len} (sweep {wildcards.sweep})"
    shell:
        "python {input.script:q} --spec {params.spec:q} --output {output.record:q}"
        " --winner {output.winner:q} --time-limit-s {resources.time_limit_s} --kept-gpu {resources.kept_gpu} > {log:q} 2>&1"
