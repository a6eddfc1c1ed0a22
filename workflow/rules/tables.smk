"""From records to tables, and the run's verdict."""


# A second's work and the run's last word: not for a batch system.
localrules:
    aggregate,
    render_benchmark,
    verdict,
    retry_failed,


rule aggregate:
    input:
        script=ancient(ROOT / "workflow/scripts/aggregate.py"),
        environment=PLAN.environment_file,
        records=records(CORRECTNESS, TIMING, MEMORY, ROOFLINE),
    output:
        benchmark="results/benchmark.csv",
        correctness="results/correctness.csv",
        comparison="results/comparison.csv",
        goals="results/goals.csv",
    log:
        "logs/aggregate.log",
    conda:
        "../envs/attention.yaml"
    params:
        # The script makes the same plan from it as this Snakefile, and so knows every job's spec.
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
        source=source_digest(ROOT / "workflow/scripts/aggregate.py", ROOT),
        specs=spec_digest({job.path: job.spec for job in PLAN.jobs()}),
    message:
        "gather the records"
    shell:
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --benchmark {output.benchmark:q}"
        " --correctness {output.correctness:q} --comparison {output.comparison:q}"
        " --goals {output.goals:q} > {log:q} 2>&1"


rule render_benchmark:
    input:
        script=ancient(ROOT / "workflow/scripts/render_benchmark.py"),
        benchmark="results/benchmark.csv",
        correctness="results/correctness.csv",
        environment=PLAN.environment_file,
    output:
        "report/benchmark.md",
    log:
        "logs/render_benchmark.log",
    conda:
        "../envs/attention.yaml"
    params:
        source=source_digest(ROOT / "workflow/scripts/render_benchmark.py", ROOT),
    message:
        "render the table"
    shell:
        "python {input.script:q} --benchmark {input.benchmark:q} --correctness {input.correctness:q}"
        " --environment {input.environment:q} --output {output:q} > {log:q} 2>&1"


rule verdict:
    input:
        script=ancient(ROOT / "workflow/scripts/give_verdict.py"),
        benchmark="results/benchmark.csv",
        correctness="results/correctness.csv",
        table="report/benchmark.md",
    output:
        "results/verdict.txt",
    log:
        "logs/verdict.log",
    conda:
        "../envs/attention.yaml"
    params:
        source=source_digest(ROOT / "workflow/scripts/give_verdict.py", ROOT),
    message:
        "the run's table, and what went wrong"
    shell:
        # Its standard output is for the person: this is the run's last word.
        "python {input.script:q} --benchmark {input.benchmark:q} --correctness {input.correctness:q}"
        " --table {input.table:q} --output {output:q} 2> {log:q}"


# One target a length: everything of that length brought up to date, and its rows shown.
for length in sorted({job.seq_len for job in PLAN.jobs() if job.seq_len}):

    rule:
        name:
            f"seq_len_{length}"
        input:
            script=ancient(ROOT / "workflow/scripts/show_seq_len.py"),
            environment=ancient(PLAN.environment_file),
            records=[job.path for job in PLAN.jobs() if job.seq_len in (length, None)],
        log:
            f"logs/seq_len_{length}.log",
        localrule: True
        conda:
            "../envs/attention.yaml"
        params:
            config=canonical_json(CONFIG),
            device=DEVICE,
            environment=PLAN.environment,
            seq_len=length,
        message:
            "the rows of seq_len {params.seq_len}"
        shell:
            "python {input.script:q} --config {params.config:q} --device {params.device}"
            " --environment {params.environment:q} --environment-file {input.environment:q}"
            " --seq-len {params.seq_len} 2> {log:q}"


rule retry_failed:
    input:
        script=ancient(ROOT / "workflow/scripts/retry_failed.py"),
    log:
        "logs/retry_failed.log",
    conda:
        "../envs/attention.yaml"
    params:
        config=canonical_json(CONFIG),
        device=DEVICE,
        environment=PLAN.environment,
        snakefile=workflow.main_snakefile,
        profile=workflow_profile(sys.argv[1:]),
    message:
        "measure again what is an error or a timeout"
    shell:
        "python {input.script:q} --config {params.config:q} --device {params.device}"
        " --environment {params.environment:q} --snakefile {params.snakefile:q}"
        " {params.profile:q} 2> {log:q}"
