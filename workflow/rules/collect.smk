"""Several kinds of GPU in one report: the results of several machines beside each other. Nothing is measured."""

from workflow.collect import seen


localrules:
    collect,


COLLECT_SWEEPS = [
    sweep
    for sweep in CONFIG["sweeps"]
    if any(CONFIG["sweeps"][sweep]["seq_lens"].values())
]
COLLECT_FIGURES = [f"report/collect/{sweep}.svg" for sweep in COLLECT_SWEEPS]
COLLECT_TABLES = [f"report/collect/{sweep}.html" for sweep in COLLECT_SWEEPS]
COLLECT_RESULTS = COLLECT_FIGURES + COLLECT_TABLES


rule collect:
    input:
        script=ancient(ROOT / "workflow/scripts/collect.py"),
    output:
        page="report/collect.md",
        cells="results/collect.csv",
        figures=[
            report(
                path,
                category="Several environments",
                caption="../report/collect.rst",
                labels={
                    "sweep": Path(path).stem,
                    "what": "latency, throughput and memory, figure",
                },
            )
            for path in COLLECT_FIGURES
        ],
        tables=[
            report(
                path,
                category="Several environments",
                caption="../report/collect_table.rst",
                labels={
                    "sweep": Path(path).stem,
                    "what": "a line an environment, table",
                },
            )
            for path in COLLECT_TABLES
        ],
    log:
        "logs/collect.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        source=source_digest(ROOT / "workflow/scripts/collect.py", ROOT),
        kernels=spec_digest(PLAN.kernel_digests | PLAN.harness_digests),
        # As inputs this machine's own records would be measured again where they are stale.
        seen=lambda wildcards: seen(CONFIG["collect"]),
    message:
        "put the environments beside each other: {output.page}"
    shell:
        # Its standard output is for the person.
        "python {input.script:q} --config {params.config:q} --page {output.page:q} --cells {output.cells:q}"
        " --figures {output.figures:q} --tables {output.tables:q} 2> {log:q}"
