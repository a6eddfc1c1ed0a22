"""The record: everything one measuring job found out, as JSON, written atomically.

A record stores the spec it was made from, so that a table can tell whether it still is what
today's configuration and code ask for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

OK = "ok"
WRONG = "wrong"
UNSUPPORTED = "unsupported"
OUT_OF_MEMORY = "out_of_memory"
ERROR = "error"
TIMEOUT = "timeout"
STATUSES = (OK, WRONG, UNSUPPORTED, OUT_OF_MEMORY, ERROR, TIMEOUT)
# What ends a run with a non-zero exit; the others are results that a benchmark expects.
FAULTS = (WRONG, ERROR, TIMEOUT)

# Sums in the order in which programs end are no error, and whoever compares bits has to know of them.
NOT_DETERMINISTIC = "not_deterministic"

# True things about an `ok` number, and what each tells the reader.
MARKS = {
    "interpreted": "a Triton kernel run by Triton's interpreter on the CPU: not comparable with native times",
    "not_attention": "a floor, which computes less than attention on purpose: what no kernel can beat",
    "grid_failed": "this implementation failed cells of the correctness grid",
    "grid_incomplete": "the correctness grid of this implementation has cells that were not judged",
    NOT_DETERMINISTIC: "the same inputs gave other bits in the grid, each time within its bounds",
    "stale": "measured from another spec (code, configuration or environment) than today's",
    "one_process": "all samples come from one process, so the interval does not tell what another would give",
    "not_steady": "the warm-up ended before successive series agreed, or the samples rise or fall in time",
    "throttled": "the GPU reported a throttle reason while samples were taken",
    "clock_moved": "the SM clock, metered beside each sample, moved by more than 5 %: compare cycles",
    "gpu_shared": "another process had the GPU open before, during or after the samples",
    "clock_not_locked": "the SM clock was to be locked and was not; the record says why",
    "clock_left_locked": "a clock lock that an earlier job left behind could not be undone",
    "launch_bound": "the host takes longer to launch a call than the device takes to run it",
    "timers_disagree": "torch.profiler, the second timer, says otherwise by more than 10 % and 5 us",
    "flush_unproven": "the controls of this run did not show that the cache was cold and clean",
}


class WriteError(OSError):
    """A file that cannot be written; says why, what became of it, and what to do."""

    def __str__(self) -> str:
        advice = next((text for numbers, text in ADVICE if self.errno in numbers), "See to that")
        return (
            f"{self.filename} cannot be written: {self.strerror}. What was there is untouched."
            f" {advice}, and run the same command again."
        )


ADVICE = (
    ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space"),
    ((errno.EACCES, errno.EPERM, errno.EROFS), "Let this user write there"),
    ((errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY), "Move away what is in its place"),
)


class RecordError(ValueError):
    """A record file that cannot be read as a record of this schema version."""


@dataclass(frozen=True)
class Record:
    """One job's result.

    `values` holds scalars with their unit in the name, `samples` every raw sample as one list per
    process (milliseconds), `cells` one object per cell of the correctness grid, and
    `circumstances` what the numbers were measured on and under.
    """

    phase: str
    spec: dict[str, Any]
    status: str
    reason: str | None = None
    marks: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    circumstances: dict[str, Any] = field(default_factory=dict)
    started_at: str = ""
    duration_s: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status = {self.status!r}: must be one of {', '.join(STATUSES)}")
        unknown = [mark for mark in self.marks if mark not in MARKS]
        if unknown:
            raise ValueError(f"marks = {unknown!r}: must be among {', '.join(MARKS)}")


CONTAINERS: dict[str, type[dict[str, Any]] | type[list[Any]]] = {
    **dict.fromkeys(("spec", "values", "samples", "circumstances"), dict),
    **dict.fromkeys(("marks", "cells"), list),
}

UNITS = ("_ms", "_us", "_bytes", "_mhz", "_second")
# The number that an `ok` record of a phase is there for.
HEADLINES = {"timing": "latency_ms", "memory": "peak_memory_bytes"}


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spec_digest(spec: dict[str, Any]) -> str:
    """A short digest of a spec, to name it by."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the whole new one, never a part.

    Raises WriteError where it cannot be written; the old file is then as it was.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as fault:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(fault, OSError):
            raise WriteError(fault.errno, fault.strerror, str(path)) from fault
        raise


def require_writable(path: Path) -> None:
    """Raise WriteError if a record could not be written to `path`: better now than after the measurement."""
    if path.is_dir():
        raise WriteError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for file in (path, history_folder(path) / path.name):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()
        except OSError as fault:
            raise WriteError(fault.errno, fault.strerror, str(file)) from fault


def history_folder(path: Path) -> Path:
    """Where copies of the records once written to `results/...` are kept: `results/history/...`.

    Raises ValueError for a path that has no `results` folder.
    """
    parts = path.with_suffix("").parts
    if "results" not in parts:
        raise ValueError(f"{path}: a record lies below a folder called results")
    root = len(parts) - 1 - parts[::-1].index("results")
    return Path(*parts[: root + 1], "history", *parts[root + 1 :])


def write_record(record: Record, path: Path) -> None:
    """Write a record to `path`, and a copy into the append-only history folder.

    The copy comes first: whatever happens to `path` afterwards (Snakemake deletes an output before
    it measures again), the measurement is not lost.
    """
    text = json.dumps(asdict(record), indent=1, allow_nan=False) + "\n"
    stamp = record.started_at.replace(":", "").replace("-", "")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    write_atomically(history_folder(path) / f"{stamp}-{digest}.json", text)
    write_atomically(path, text)


def read_record(path: Path) -> Record:
    """Read a record; raise RecordError, naming the file, if it is not one of this schema version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as fault:
        raise RecordError(f"{path}: not a readable record: {fault}") from fault
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path}: schema_version = {version}: this code reads {SCHEMA_VERSION}")
    unknown = set(content) - {f.name for f in fields(Record)}
    if unknown:
        raise RecordError(f"{path}: unknown fields {', '.join(sorted(unknown))}")
    for name, kind in CONTAINERS.items():
        if not isinstance(content.get(name, kind()), kind):
            raise RecordError(f"{path}: {name} is no JSON {'object' if kind is dict else 'array'}")
    try:
        record = Record(**content)
        _require_numbers(record)
    except (TypeError, ValueError) as fault:
        raise RecordError(f"{path}: {fault}") from fault
    return record


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number that this code writes")


def _require_numbers(record: Record) -> None:
    """Raise ValueError for a record that whoever uses its numbers could not trust to be any."""
    planned = record.spec.get("phase", record.phase)
    if planned != record.phase:
        raise ValueError(f"phase = {record.phase!r}: its spec is of the phase {planned!r}")
    for name, value in record.values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.endswith(UNITS) and not (number or value is None):
            raise ValueError(f"{name} = {value!r}: must be a number")
    needed = HEADLINES.get(record.phase)
    if record.status == OK and needed is not None:
        if (headline := record.values.get(needed)) is None:
            raise ValueError(f"{needed}: missing, though its status is ok")
        if headline < 0:
            raise ValueError(f"{needed} = {headline!r}: must not be negative")
