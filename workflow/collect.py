"""The results of several machines beside each other: which environments there are, and a row of each a cell.

Nothing is measured here. Each environment's records are held against what this checkout and this
configuration would measure there, as the tables of a run are, and against each other: a number that is of
another problem stands apart, and one of another kernel or measurement is marked.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.problem import Problem
from harness.record import OK, Record, RecordError, canonical_json, read_record, spec_digest
from workflow.plan import CORRECTNESS, MEMORY, ROOFLINE, TIMING, TUNING, Plan
from workflow.tables import (
    MEMORY_COLUMNS,
    PROBLEM_COLUMNS,
    TIMING_COLUMNS,
    benchmark_rows,
    correctness_rows,
    load_measurement,
)

ENVIRONMENT_FILE = "environment.json"
PHASES = {TIMING: ("latency", TIMING_COLUMNS), MEMORY: ("memory", MEMORY_COLUMNS)}
# Why a cell is empty, beside the statuses of a record.
NOT_MEASURED = "not_measured"
NOT_ASKED_FOR = "not_asked_for"
OTHER_PROBLEM = "other_problem"
EMPTIED = {"", NOT_MEASURED, NOT_ASKED_FOR, OTHER_PROBLEM}
# True things about a number that only the other environments' numbers show.
OTHER_KERNEL = "other_kernel"
OTHER_MEASUREMENT = "other_measurement"
COLLECT_MARKS = {
    OTHER_KERNEL: "the environments did not run one kernel here, and this is not this checkout's:"
    ' see "Kernels"',
    OTHER_MEASUREMENT: "the environments were not measured alike here (the harness, or settings), and this"
    ' is not as this checkout would: see "Stale, and why"',
}
ALLOWED = (
    "allowed in `collect`: folders results/<environment> as a run writes them, with their environment.json,"
    " or a folder of such folders"
)


class CollectFault(Exception):
    """Folders that cannot be put beside each other; the message is one line for a person."""


@dataclass(frozen=True)
class Environment:
    """One environment's results: its key, where they lie, and its environment.json."""

    key: str
    folder: Path
    account: dict[str, Any]

    @property
    def device(self) -> str:
        device: str = self.account["device"]
        return device


@dataclass(frozen=True)
class CollectedPlan(Plan):
    """The plan of an environment whose results may lie anywhere."""

    source: str = ""

    @property
    def folder(self) -> str:
        return self.source


@dataclass(frozen=True)
class Collection:
    """What was found: the environments, their rows, and what is in no table.

    `rows` has a row per (sweep, seq_len, implementation, environment); `apart` those that were measured at
    another problem than the configuration's; `kernels` a line per version of a kernel that was run;
    `copies` folders that hold what another one holds; `left_out` what the configuration does not name.
    """

    environments: list[Environment]
    rows: list[dict[str, Any]]
    apart: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    copies: list[str]
    left_out: dict[str, list[str]]


def seen(folders: Sequence[str]) -> str:
    """A digest of every result in these folders; of what is not there too, so that a change is seen."""
    found = {
        str(file): _content(file)
        for named in folders
        for folder in _candidates(Path(named))
        for file in _files(folder)
    }
    return spec_digest(found)


def find_environments(folders: Sequence[str]) -> tuple[list[Environment], list[str]]:
    """The environments whose results lie in these folders, by key, and the folders that are copies.

    Raises CollectFault where a folder is not one environment's, or where two are said to be one.
    """
    found: dict[str, Environment] = {}
    copies = []
    for named in folders:
        candidates = _candidates(Path(named))
        if not candidates:
            raise CollectFault(f"{named}: holds no environment's results; {ALLOWED}")
        for folder in candidates:
            environment = _read(folder)
            other = found.setdefault(environment.key, environment)
            if other.folder.resolve() == folder.resolve():
                continue
            _refuse_to_merge(other, environment)
            copies.append(f"{folder} holds what {other.folder} holds, and is counted once")
    if len(found) < 2:
        names = ", ".join(str(environment.folder) for environment in found.values())
        raise CollectFault(f"one environment only ({names}), and nothing to compare it with; {ALLOWED}")
    return [found[key] for key in sorted(found)], copies


def collect(config: dict[str, Any], root: Path) -> Collection:
    """Everything that the configuration asks for, of every environment in its folders `collect`.

    `root` is the checkout, whose code each record is held against. Raises CollectFault as
    `find_environments`.
    """
    environments, copies = find_environments(config["collect"])
    joint = _with_all_lengths(config)
    rows, apart = [], []
    left_out = {}
    cells: dict[tuple[str, str, int, str], dict[str, _Measured]] = {}
    for environment in environments:
        plan = CollectedPlan(
            joint, environment.device, environment.key, root, source=str(environment.folder.resolve())
        )
        asked = {sweep: config["sweeps"][sweep]["seq_lens"][environment.device] for sweep in config["sweeps"]}
        for row in benchmark_rows(plan, Path(), correctness_rows(plan, Path())):
            for phase, (prefix, columns) in PHASES.items():
                if not plan.measures(row["sweep"], phase):
                    continue
                measured = _measured(plan, phase, row)
                if measured is None:
                    if row["seq_len"] in asked[row["sweep"]]:
                        _empty(row, prefix, columns, NOT_MEASURED, "no record")
                    else:
                        why = f"the configuration has no such length for {plan.device}"
                        _empty(row, prefix, columns, NOT_ASKED_FOR, why)
                elif measured.problem_changes:
                    apart.append(_apart(plan, phase, row, measured))
                    _empty(row, prefix, columns, OTHER_PROBLEM, measured.problem_text())
                else:
                    where = (phase, row["sweep"], row["seq_len"], row["implementation"])
                    cells.setdefault(where, {})[environment.key] = measured
                    row |= measured.columns(prefix)
            rows.append(row)
        left_out[environment.key] = _left_out(plan)
    _mark(rows, cells)
    of_use = _places(rows)
    kept = [row for row in rows if (row["sweep"], row["seq_len"]) in of_use]
    order = [environment.key for environment in environments]
    place = {cell: index for index, cell in enumerate(_cell_order(joint))}
    kept.sort(key=lambda row: (place[_cell(row)], order.index(row["environment"])))
    return Collection(environments, kept, apart, _kernels(cells, config, root), copies, left_out)


@dataclass(frozen=True)
class _Measured:
    """A record, and in which entries its spec is not today's: each with what it was and what it is today."""

    record: Record
    changes: dict[str, tuple[Any, Any]]

    def part(self, *beginnings: str) -> dict[str, tuple[Any, Any]]:
        return {name: pair for name, pair in self.changes.items() if name.startswith(beginnings)}

    @property
    def problem_changes(self) -> dict[str, tuple[Any, Any]]:
        return self.part("problem.")

    @property
    def kernel_changes(self) -> dict[str, tuple[Any, Any]]:
        return self.part("source.kernel", "implementation.")

    @property
    def measurement_changes(self) -> dict[str, tuple[Any, Any]]:
        return {
            name: pair
            for name, pair in self.changes.items()
            if name not in self.problem_changes | self.kernel_changes
        }

    def problem_text(self) -> str:
        return "measured with " + ", ".join(
            f"{name.removeprefix('problem.')} {was} in place of {now}"
            for name, (was, now) in self.problem_changes.items()
        )

    def columns(self, prefix: str) -> dict[str, Any]:
        """What the record says of its code, by columns."""
        changed = sorted(self.changes)
        if "stale" in self.record.marks and not changed:
            changed = ["launch options (not those of the tuning in its folder)"]
        return {
            f"{prefix}_kernel_digest": self.record.spec.get("source", {}).get("kernel"),
            f"{prefix}_harness_digest": self.record.spec.get("source", {}).get("harness"),
            f"{prefix}_options": self.record.values.get("options"),
            f"{prefix}_changed": ", ".join(changed),
        }


def _candidates(named: Path) -> list[Path]:
    """The folder if it is an environment's, or those in it that are, by name."""
    if _is_results(named):
        return [named]
    if not named.is_dir():
        return []
    return sorted(folder for folder in named.iterdir() if _is_results(folder))


def _is_results(folder: Path) -> bool:
    return (folder / ENVIRONMENT_FILE).exists() or any((folder / phase).is_dir() for phase in PHASES)


def _files(folder: Path) -> list[Path]:
    """Every file of an environment's results that a row may depend on."""
    files = [folder / ENVIRONMENT_FILE, folder / f"{ROOFLINE}.json"]
    for phase in (CORRECTNESS, TUNING, TIMING, MEMORY):
        files += sorted((folder / phase).rglob("*.json"))
    return [file for file in files if file.is_file()]


def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read(folder: Path) -> Environment:
    """The environment in a folder, all of whose records must be its own; CollectFault if one is not."""
    file = folder / ENVIRONMENT_FILE
    try:
        account = json.loads(file.read_text(encoding="utf-8"))
        key, device = account["key"], account["device"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CollectFault(
            f"{file}: does not say what was measured on ({type(fault).__name__}: {fault}): copy it from the"
            " machine, or leave the folder out"
        ) from fault
    if not isinstance(key, str) or not key.isprintable() or device not in ("cuda", "cpu"):
        raise CollectFault(f"{file}: key = {key!r}, device = {device!r}: must be text, and cuda or cpu")
    if not isinstance(account.get("gpu") or {}, dict):
        raise CollectFault(f"{file}: gpu = {account['gpu']!r}: must be an object, or not there")
    for path in _files(folder):
        for what, other in _keys_in(path):
            if other != key:
                raise CollectFault(
                    f"{path}: {what} = {other}, in the folder of {key}: two environments are not made one;"
                    " allowed: a folder for each, with its own environment.json"
                )
    return Environment(key, folder, account)


def _keys_in(path: Path) -> Iterator[tuple[str, str]]:
    """The environment that a record was planned for, and the one that its machine found itself to be."""
    try:
        record = read_record(path)
    except RecordError:  # no record, or one that becomes a row with an error
        return
    for name in ("source", "problem", "implementation"):
        if not isinstance(record.spec.get(name, {}), dict):
            raise CollectFault(
                f"{path}: spec.{name} = {record.spec[name]!r}: must be an object, as a run writes it: copy"
                " the file from the machine again, or leave it out"
            )
    for what, holder, name in (
        ("spec.environment", record.spec, "environment"),
        # A job that found itself elsewhere measured nothing, and its record says so.
        ("circumstances.key", record.circumstances if record.status == OK else {}, "key"),
    ):
        if name in holder:
            yield what, str(holder[name])


def _refuse_to_merge(one: Environment, other: Environment) -> None:
    """Raise CollectFault unless two folders of one key hold the same."""
    contents = [
        {str(file.relative_to(side.folder)): file for file in _files(side.folder)} for side in (one, other)
    ]
    for name in sorted(contents[0].keys() | contents[1].keys()):
        sides = [content.get(name) for content in contents]
        if None not in sides and len({_content(file) for file in sides if file}) == 1:
            continue
        values = " and ".join(_told(file) for file in sides)
        raise CollectFault(
            f"{one.folder} and {other.folder} both say that they are {one.key}, and differ in {name}"
            f" ({values}): two machines' numbers are not made one environment; allowed in `collect`: one of"
            " the two folders"
        )


def _told(file: Path | None) -> str:
    """What a reader can tell two versions of a file apart by."""
    if file is None:
        return "not there"
    try:
        record = read_record(file)
    except RecordError:
        return f"sha256 {_content(file)[:12]}"
    for name in ("latency_ms", "peak_memory_bytes"):
        if name in record.values:
            return f"{name} = {record.values[name]}"
    return f"{record.status}, {record.started_at}"


def _with_all_lengths(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with each sweep's lengths of every device on every device."""
    joint = copy.deepcopy(config)
    for sweep in joint["sweeps"].values():
        lengths = sorted({n for lengths in sweep["seq_lens"].values() for n in lengths})
        sweep["seq_lens"] = dict.fromkeys(sweep["seq_lens"], lengths)
    return joint


def _measured(plan: Plan, phase: str, row: Mapping[str, Any]) -> _Measured | None:
    """The record behind one half of a row; None if there is no file."""
    job = plan.sweep_job(phase, row["sweep"], row["implementation"], row["seq_len"])
    if not Path(job.path).exists():
        return None
    record = load_measurement(plan, job, Path())
    was, now = _flat(_with_defaults(record.spec)), _flat(_with_defaults(job.spec))
    names = sorted(was.keys() | now.keys())
    return _Measured(
        record,
        {name: (was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)},
    )


def _with_defaults(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec whose problem has every field: an older record lacks those that there were not."""
    try:
        return {**spec, "problem": Problem.from_dict(spec["problem"]).to_dict()}
    except (KeyError, TypeError, ValueError):
        return spec


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "options":
            pairs |= _flat(value, f"{above}{name}.")
        else:
            pairs[f"{above}{name}"] = value
    return pairs


def _empty(row: dict[str, Any], prefix: str, columns: Sequence[str], status: str, reason: str) -> None:
    """Leave one half of a row without a number, and say why."""
    row |= dict.fromkeys(columns)
    row |= {f"{prefix}_status": status, f"{prefix}_reason": reason}


def _apart(plan: Plan, phase: str, row: Mapping[str, Any], measured: _Measured) -> dict[str, Any]:
    """What was measured of another problem, with that problem."""
    prefix, columns = PHASES[phase]
    problem = measured.record.spec.get("problem", {})
    return {
        **{name: row[name] for name in ("environment", "sweep", "implementation")},
        "seq_len": problem.get("seq_len_k", row["seq_len"]),
        "phase": phase,
        "apart": measured.problem_text(),
        **{name: problem.get(name) for name in PROBLEM_COLUMNS},
        **{name: row.get(name) for name in columns},
        f"{prefix}_status": row[f"{prefix}_status"],
        f"{prefix}_reason": row[f"{prefix}_reason"],
        "marks": row["marks"],
        **measured.columns(prefix),
    }


def _mark(
    rows: Sequence[dict[str, Any]], cells: Mapping[tuple[str, str, int, str], dict[str, _Measured]]
) -> None:
    """Mark what is not of the kernel, or not of the measurement, that the other environments had.

    Where they differ, each that is not as this checkout has it is marked: where none is, all are.
    """
    found: dict[tuple[str, str, int, str], list[str]] = {}
    for (_, sweep, seq_len, implementation), measured in cells.items():
        for mark, part in (
            (OTHER_KERNEL, {key: one.kernel_changes for key, one in measured.items()}),
            (OTHER_MEASUREMENT, {key: one.measurement_changes for key, one in measured.items()}),
        ):
            if len({canonical_json(changes) for changes in part.values()}) > 1:
                for key in (key for key, changes in part.items() if changes):
                    found.setdefault((key, sweep, seq_len, implementation), []).append(mark)
    for row in rows:
        if {row.get(f"{prefix}_status") for prefix, _ in PHASES.values()} <= EMPTIED:
            row["marks"] = ""  # they were of what is not here
            continue
        here = (row["environment"], row["sweep"], row["seq_len"], row["implementation"])
        row["marks"] = " ".join(dict.fromkeys([*row["marks"].split(), *found.get(here, [])]))


def _cell(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["sweep"], row["seq_len"], row["implementation"]


def _cell_order(config: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    for name, sweep in config["sweeps"].items():
        for seq_len in next(iter(sweep["seq_lens"].values())):
            for implementation in sweep["implementations"]:
                yield name, seq_len, implementation


def _places(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """The (sweep, seq_len) that at least one environment was asked about, or has something of."""
    return {
        (row["sweep"], row["seq_len"])
        for row in rows
        if any(row.get(f"{prefix}_status") not in ("", NOT_ASKED_FOR) for prefix, _ in PHASES.values())
    }


def _left_out(plan: CollectedPlan) -> list[str]:
    """The records of timing and memory that the configuration does not name, as `phase/sweep/...`."""
    named = {
        plan.sweep_job(phase, *(cell[0], cell[2], cell[1])).path for cell in plan.cells() for phase in PHASES
    }
    folder = Path(plan.folder)
    return [
        str(file.relative_to(folder).with_suffix(""))
        for phase in PHASES
        for file in sorted((folder / phase).rglob("*.json"))
        if str(file) not in named
    ]


def _kernels(
    cells: Mapping[tuple[str, str, int, str], dict[str, _Measured]], config: dict[str, Any], root: Path
) -> list[dict[str, Any]]:
    """A line for each version of what an implementation is: where it was run, and if it is today's."""
    found: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for (_, _, _, implementation), measured in cells.items():
        for key, one in measured.items():
            if not one.record.started_at:
                continue  # could not be read, and says nothing
            spec = one.record.spec
            what = spec.get("implementation", {})
            version = (
                implementation,
                str(what.get("kernel")),
                canonical_json(what.get("options", {})),
                str(spec.get("source", {}).get("kernel")),
            )
            line = found.setdefault(version, {"today": not one.kernel_changes, "cells": {}, "commits": set()})
            line["cells"][key] = line["cells"].get(key, 0) + 1
            if (commit := one.record.circumstances.get("source", {}).get("commit")) is not None:
                line["commits"].add(str(commit)[:12])
    order = list(config["implementations"])
    return [
        {
            "implementation": version[0],
            "kernel": version[1],
            "options": version[2],
            "digest": version[3],
            "today": line["today"],
            "cells": line["cells"],
            "commits": sorted(line["commits"]),
        }
        for version, line in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0]))
    ]


def names_of(environments: Sequence[Environment]) -> dict[str, str]:
    """A short name for each key: its machine, with as much of the key as tells it from the others."""
    names = {}
    for environment in environments:
        machine, *rest = environment.key.split("_")
        alike = [other.key.split("_") for other in environments if other.key.split("_")[0] == machine]
        short = machine.removeprefix("nvidia-")
        if environment.device == "cpu" and sum(other.device == "cpu" for other in environments) == 1:
            short = "cpu"
        telling = [
            part
            for place, part in enumerate(rest, start=1)
            if len({key[place] if place < len(key) else "" for key in alike}) > 1
        ]
        names[environment.key] = " ".join([short, *telling])
    if len(set(names.values())) < len(names):
        return {key: key for key in names}
    return names
