"""Snakemake as it is, but that it looks at its jobs each second, where the plugin waits ever longer."""

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

RemoteExecutor.next_seconds_between_status_checks = property(lambda _: 1, lambda _, seconds: None)
main()
