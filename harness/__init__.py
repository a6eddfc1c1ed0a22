"""How attention kernels are checked and measured. Knows no kernel by name and no Snakemake."""
