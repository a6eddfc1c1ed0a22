"""The workflow: configuration, rules and scripts (the only room that knows Snakemake)."""
