"""A copy of the project in a temporary folder, in which a real Snakemake runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEST_KERNELS = Path(__file__).parent / "kernels"
PARTS = ("Snakefile", "config", "harness", "kernels", "profiles", "workflow")


@dataclass(frozen=True)
class Checkout:
    folder: Path

    @classmethod
    def make(cls, folder: Path, *test_kernels: str) -> Checkout:
        """Copy the project, and these kernels of the tests into its kernels folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        for name in test_kernels:
            shutil.copy(TEST_KERNELS / f"{name}.py", folder / "kernels")
        return cls(folder)

    def environment(self, **variables: str) -> dict[str, str]:
        locks = {"ATTENTION_BENCH_LOCKS": str(self.folder / "locks")}
        cleaned = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return {**cleaned, **locks, **variables}

    def configure(self, config: dict[str, Any]) -> None:
        (self.folder / "config" / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *arguments]

    def snakemake(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    def planned(self, *arguments: str) -> dict[str, int]:
        """How many jobs of each rule a dry run would run."""
        output = self.snakemake("-n", *arguments)
        assert output.returncode == 0, output.stdout
        jobs = {}
        table = output.stdout.split("Job stats:")[-1] if "Job stats:" in output.stdout else ""
        for line in table.splitlines()[3:]:
            words = line.split()
            if len(words) != 2 or not words[1].isdigit():
                break
            jobs[words[0]] = int(words[1])
        jobs.pop("total", None)
        return jobs

    def measurements_planned(self, *arguments: str, **variables: str) -> set[str]:
        """What a dry run would measure, in the words of the rules' messages; `tables` if it makes them."""
        output = self.snakemake("-n", *arguments, **variables)
        assert output.returncode == 0, output.stdout
        messages = {
            line.split(": ", 1)[1] for line in output.stdout.splitlines() if re.match(r"Job \d+: ", line)
        }
        measuring = {
            message for message in messages if re.match("(check|tune|time|measure memory of) ", message)
        }
        return measuring | ({"tables"} if "gather the records" in messages else set())

    def start(self, output: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start Snakemake in a process group of its own, with what it prints going to a file."""
        with output.open("w") as stream:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(**variables),
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """The command lines of all processes that run in this folder or were started for it."""
        found = {}
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    here = os.readlink(process / "cwd") == str(self.folder)
                    started_for_it = str(self.folder).encode() in (process / "environ").read_bytes()
                    if state not in "ZX" and (here or started_for_it):
                        found[int(process.name)] = (process / "cmdline").read_bytes().decode()
        return found

    def history(self) -> dict[str, list[dict[str, Any]]]:
        """All measurements ever made, oldest first, by `phase/[sweep/]implementation/seq_len`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((self.folder / "results" / "history").rglob("*.json")):
            job = "/".join(path.relative_to(self.folder / "results" / "history").parts[1:-1])
            found.setdefault(job, []).append(json.loads(path.read_text()))
        return found

    def records(self, phase: str) -> dict[str, dict[str, Any]]:
        """The records of a phase by `[sweep/]implementation/seq_len`."""
        found = {}
        for folder in (self.folder / "results").glob(f"*/{phase}"):
            if folder.parent.name != "history":
                for path in folder.rglob("*.json"):
                    found[str(path.relative_to(folder).with_suffix(""))] = json.loads(path.read_text())
        return found

    def csv(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.folder / "results" / f"{name}.csv")

    def table(self) -> str:
        return (self.folder / "report" / "benchmark.md").read_text()


def small_config(**implementations: str) -> dict[str, Any]:
    """The smallest useful run on a CPU: one seq_len, four cells of the grid, one sweep."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config" / "small.yaml").read_text())
    config["device"] = "cpu"
    config["implementations"] = {name: {"kernel": kernel} for name, kernel in implementations.items()}
    if config["baseline"] not in implementations:
        config["baseline"] = None
    config["correctness"]["seq_lens"]["cpu"] = [33]
    config["sweeps"]["tiny"]["seq_lens"]["cpu"] = [32]
    return config
