"""A record is read back as it was written, whole or not at all, and a former one is never lost."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import (
    FAULTS,
    STATUSES,
    Record,
    RecordError,
    canonical_json,
    history_folder,
    read_record,
    spec_digest,
    write_atomically,
    write_record,
)

RECORD = Record(
    phase="timing",
    spec={"phase": "timing", "problem": {"seq_len_q": 512}},
    status="ok",
    marks=["interpreted", "not_steady"],
    values={"latency_ms": 0.616, "note": "Straße"},
    samples={"cold_ms": [[0.6, 0.7], [0.5]]},
    cells=[{"batch": 1, "status": "ok"}],
    circumstances={"torch": "2.13.0"},
    started_at="2026-01-02T03:04:05.678901Z",
    duration_s=1.5,
)


def changed(**fields: Any) -> Record:
    return Record(**{**vars(RECORD), **fields})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "env_torch2.13.0+cpu_python3.11" / "timing" / "512.json"


def test_a_record_comes_back_as_it_was_written(path: Path) -> None:
    write_record(RECORD, path)
    assert read_record(path) == RECORD


def test_a_record_can_be_read_by_other_users(path: Path) -> None:
    write_record(RECORD, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_the_history_keeps_every_former_record(path: Path) -> None:
    records = [changed(duration_s=float(n)) for n in range(3)]
    for record in records:
        write_record(record, path)
        path.unlink()  # as Snakemake does before it measures again
    kept = [read_record(copy) for copy in history_folder(path).iterdir()]
    assert sorted(kept, key=lambda record: record.duration_s) == records


def test_the_history_of_two_environments_is_kept_apart(tmp_path: Path) -> None:
    folders = {history_folder(tmp_path / f"results/python3.{minor}/timing/512.json") for minor in (11, 12)}
    assert folders == {tmp_path / f"results/history/python3.{minor}/timing/512" for minor in (11, 12)}


def test_a_path_outside_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below a folder called results"):
        write_record(RECORD, tmp_path / "512.json")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "new \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_reader_never_sees_half_a_record_though_writers_are_killed(path: Path) -> None:
    write_record(RECORD, path)
    bulk = {"cold_ms": [[float(n) for n in range(30_000)]]}
    for turn in range(25):
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    write_atomically(path, json.dumps(vars(changed(samples=bulk, duration_s=float(turn)))))
            finally:
                os._exit(1)
        end = time.monotonic() + 0.02 + 0.002 * turn  # another moment of the write each time
        try:
            while time.monotonic() < end:
                read_record(path)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        read_record(path)
    assert read_record(path).samples == bulk


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"phase": "timing"', "not a readable record"),
        ("", "not a readable record"),
        ("[]", "schema_version = None"),
        ("{}", "schema_version = None"),
        ('{"schema_version": 99}', "schema_version = 99: this code reads 1"),
        ('{"schema_version": 1, "phase": "p", "spec": {}, "status": "ok", "mood": 1}', "unknown fields mood"),
        ('{"schema_version": 1, "phase": "p", "spec": {}, "status": "fine"}', "status = 'fine'"),
        ('{"schema_version": 1, "phase": "p", "spec": {}, "status": "ok", "marks": ["odd"]}', "odd"),
        ('{"schema_version": 1, "phase": "p", "status": "ok"}', "spec"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"values": {}}, "latency_ms: missing, though its status is ok"),
        ({"values": {"latency_ms": None}}, "latency_ms: missing"),
        ({"values": {"latency_ms": "fast"}}, "latency_ms = 'fast': must be a number"),
        ({"values": {"latency_ms": True}}, "latency_ms = True: must be a number"),
        ({"values": {"latency_ms": math.nan}}, "NaN is no number"),
        ({"values": {"latency_ms": math.inf}}, "Infinity is no number"),
        ({"values": {"latency_ms": -1.0}}, "latency_ms = -1.0: must not be negative"),
        ({"values": {"latency_ms": 1.0, "host_time_us": []}}, "host_time_us = []: must be a number"),
        ({"phase": "memory"}, "phase = 'memory': its spec is of the phase 'timing'"),
    ],
)
def test_a_record_whose_numbers_are_none_is_no_record(tmp_path: Path, changes: Any, says: str) -> None:
    good = {"phase": "timing", "spec": {"phase": "timing"}, "status": "ok", "schema_version": 1}
    path = tmp_path / "timing.json"
    path.write_text(json.dumps({**good, "values": {"latency_ms": 1.0, "host_time_us": None}}))
    read_record(path)
    path.write_text(json.dumps({**good, "values": {"latency_ms": 1.0}, **changes}))
    with pytest.raises(RecordError, match=re.escape(says)):
        read_record(path)
    path.write_text(json.dumps({**good, "values": {}, "status": "error"}))
    read_record(path)


def test_a_missing_file_and_one_that_is_not_text_are_refused_by_name(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "missing.json"):
        with pytest.raises(RecordError, match=path.name):
            read_record(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_never_written(path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(changed(values={"latency_ms": value}), path)
    assert not path.exists()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": value})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=5), st.randoms())
def test_equal_specs_have_equal_text_whatever_their_order(spec: dict[str, Any], random: Any) -> None:
    items = list(spec.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(spec)
    assert spec_digest(dict(items)) == spec_digest(spec)
    assert json.loads(canonical_json(spec)) == spec


def test_another_spec_has_another_digest() -> None:
    specs: list[dict[str, Any]] = [{"a": 1}, {"a": 2}, {"a": "1"}, {"a": [1]}, {"b": 1}, {}]
    assert len({spec_digest(spec) for spec in specs}) == len(specs)


def test_what_ends_a_run_is_a_known_status() -> None:
    assert set(FAULTS) < set(STATUSES)
    assert "out_of_memory" not in FAULTS
    assert "unsupported" not in FAULTS
