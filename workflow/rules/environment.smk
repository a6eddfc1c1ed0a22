"""What the run is measured on."""


rule environment:
    input:
        script=ancient(ROOT / "workflow/scripts/capture_environment.py"),
    output:
        PLAN.environment_file,
    log:
        f"logs/{PLAN.environment}/environment.log",
    params:
        key=PLAN.environment,
    shell:
        "python {input.script:q} --device {DEVICE} --key {params.key:q} --output {output:q} > {log:q} 2>&1"
