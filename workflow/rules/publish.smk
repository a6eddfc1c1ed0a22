"""A run as rendered, for the repository: docs/results/<machine>/<config>/ and the README's tables."""


localrules:
    publish,


rule publish:
    input:
        script=ancient(ROOT / "workflow/scripts/publish.py"),
        environment=PLAN.environment_file,
        pages=[
            "results/benchmark.csv",
            "results/correctness.csv",
            "results/comparison.csv",
            *(["results/goals.csv"] if CONFIG["goals"] else []),
            "report/benchmark.md",
            "report/report.md",
        ],
        figures=FIGURES,
    log:
        "logs/publish.log",
    conda:
        "../envs/attention.yaml"
    params:
        name=config_name(),
    message:
        "publish the run"
    shell:
        "python {input.script:q} --environment {input.environment:q} --config-name {params.name:q}"
        " --files {input.pages:q} {input.figures:q} 2> {log:q}"
