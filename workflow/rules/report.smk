"""From tables to figures and pages, and Snakemake's own HTML report around them."""

import json
import shlex


report: "../report/workflow.rst"


SWEEPS_WITH = {
    phase: [
        sweep
        for sweep in CONFIG["sweeps"]
        if PLAN.seq_lens(sweep) and PLAN.measures(sweep, phase)
    ]
    for phase in (TIMING, MEMORY)
}
# At the beginning of a line Snakemake takes `report` for its directive.
reported = report
# A label with two values, each of half the results, becomes a switch in the report, which shows nothing
# at all where a result lacks its counterpart: so whether it is a figure or a table is no label of its own.
REPORTED_FIGURES = (
    [
        reported(
            f"report/figures/{sweep}_{quantity}.svg",
            category=category,
            caption=f"../report/{quantity}.rst",
            labels={"sweep": sweep, "what": f"{quantity}, figure"},
        )
        for phase, quantity, category in (
            (TIMING, "latency", "Latency"),
            (TIMING, "throughput", "Latency"),
            (MEMORY, "memory", "Memory"),
        )
        for sweep in SWEEPS_WITH[phase]
    ]
    + [
        reported(
            "report/figures/error.svg",
            category="Correctness",
            caption="../report/error.rst",
            labels={"what": "largest error by length, figure"},
        )
    ]
    + [
        reported(
            f"report/figures/{goal}_goal.svg",
            category="Goals",
            caption="../report/goal.rst",
            labels={"what": f"{goal}, figure"},
        )
        for goal in CONFIG["goals"]
    ]
)
REPORTED_TABLES = [
    reported(
        f"report/tables/{sweep}_{quantity}.html",
        category=category,
        caption=f"../report/{quantity}_table.rst",
        labels={"sweep": sweep, "what": f"{what}, table"},
    )
    for phase, quantity, category, what in (
        (TIMING, "latency", "Latency", "latency and throughput"),
        (TIMING, "comparison", "Latency", "comparisons and their certainty"),
        (MEMORY, "memory", "Memory", "memory"),
    )
    for sweep in SWEEPS_WITH[phase]
] + [
    reported(
        f"report/tables/{name}.html",
        category=category,
        caption=f"../report/{name}.rst",
        labels={"what": f"{what}, table"},
    )
    for name, category, what in (
        ("correctness", "Correctness", "each implementation"),
        ("correctness_cells", "Correctness", "every cell of the grid"),
        *([("goals", "Goals", "every cell of every goal")] if CONFIG["goals"] else []),
        ("environment", "Environment", "what the run was measured on"),
    )
]
# Other rules name them without their captions.
FIGURES = [str(path) for path in REPORTED_FIGURES]
TABLES = [str(path) for path in REPORTED_TABLES]
# The HTML report is made by another Snakemake, which must read the same configuration.
CONFIG_OPTIONS = shlex.join(
    [
        *(
            ["--configfile", *map(str, workflow.overwrite_configfiles)]
            if workflow.overwrite_configfiles
            else []
        ),
        *(
            [
                "--config",
                *(
                    f"{key}={json.dumps(value)}"
                    for key, value in workflow.config_settings.config.items()
                ),
            ]
            if workflow.config_settings.config
            else []
        ),
    ]
)


localrules:
    figures,
    render_report,
    report,


rule figures:
    input:
        script=ancient(ROOT / "workflow/scripts/plot_figures.py"),
        benchmark="results/benchmark.csv",
        correctness="results/correctness.csv",
        goals="results/goals.csv",
    output:
        REPORTED_FIGURES,
    log:
        "logs/figures.log",
    conda:
        "../envs/attention.yaml"
    params:
        # For the captions.
        processes=CONFIG["timing"]["processes"][DEVICE],
        samples=CONFIG["timing"]["samples"],
        samples_interpreted=CONFIG["timing"]["samples_interpreted"],
        source=source_digest(ROOT / "workflow/scripts/plot_figures.py", ROOT),
    message:
        "draw the figures"
    shell:
        "python {input.script:q} --benchmark {input.benchmark:q} --correctness {input.correctness:q}"
        " --goals {input.goals:q} --output {output:q} > {log:q} 2>&1"


rule render_report:
    input:
        script=ancient(ROOT / "workflow/scripts/render_report.py"),
        benchmark="results/benchmark.csv",
        correctness="results/correctness.csv",
        comparison="results/comparison.csv",
        goals="results/goals.csv",
        environment=PLAN.environment_file,
    output:
        page="report/report.md",
        tables=REPORTED_TABLES,
    log:
        "logs/render_report.log",
    conda:
        "../envs/attention.yaml"
    params:
        # The page links the figures and says nothing that is read off them.
        figures=FIGURES,
        source=source_digest(ROOT / "workflow/scripts/render_report.py", ROOT),
    message:
        "write the report"
    shell:
        "python {input.script:q} --benchmark {input.benchmark:q} --correctness {input.correctness:q}"
        " --comparison {input.comparison:q} --goals {input.goals:q} --environment {input.environment:q}"
        " --figures {params.figures:q} --page {output.page:q} --tables {output.tables:q} > {log:q} 2>&1"


rule report:
    input:
        # These are shown where they were asked for (`snakemake profile`, `collect`), and are not made for this.
        results=FIGURES
        + TABLES
        + [path for path in PROFILE_RESULTS + COLLECT_RESULTS if Path(path).exists()],
        captions=sorted((ROOT / "workflow/report").glob("*.rst")),
        stylesheet=ROOT / "workflow/report/style.css",
    output:
        "report/report.html",
    log:
        "logs/report.log",
    conda:
        "../envs/attention.yaml"
    params:
        snakefile=workflow.main_snakefile,
        config_options=CONFIG_OPTIONS,
    message:
        "make Snakemake's report: {output}"
    shell:
        # The lock is held by the run that this job belongs to.
        "python -m snakemake --snakefile {params.snakefile:q} --nolock {input.results:q}"
        " --report {output:q} --report-stylesheet {input.stylesheet:q} {params.config_options} > {log:q} 2>&1"
