"""What the run is measured on."""


rule environment:
    input:
        script=ancient(ROOT / "workflow/scripts/capture_environment.py"),
    output:
        PLAN.environment_file,
    log:
        f"logs/{PLAN.environment}/environment.log",
    conda:
        "../envs/attention.yaml"
    resources:
        gpu=GPUS,
    params:
        key=PLAN.environment,
        device=DEVICE,
    message:
        "write down what this machine is"
    shell:
        "python {input.script:q} --device {params.device} --key {params.key:q} --output {output:q} > {log:q} 2>&1"
