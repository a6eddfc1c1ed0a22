"""A job by hand takes its spec as JSON or from a record, and refuses anything else before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.command import JobArguments, job_arguments
from harness.record import Record, write_record

SPEC = {"phase": "timing", "implementation": {"kernel": "mine", "options": {"tile": 32, "stages": 2}}}
OPTIONS = {"tile": 32, "stages": 2}


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> JobArguments:
    monkeypatch.setattr("sys.argv", ["measure.py", *map(str, arguments)])
    return job_arguments("Measure.")


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: Any, output: Any
) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(monkeypatch, "--spec", spec, "--output", output)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_spec_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (json.dumps(SPEC), "\n " + json.dumps(SPEC, indent=1)):
        found = parse(monkeypatch, "--spec", text, "--output", "results/a.json", "--time-limit-s", "1.5")
        assert found == JobArguments(SPEC, Path("results/a.json"), 1.5, OPTIONS, None)


def test_a_spec_may_be_a_record_that_holds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "results" / "512.json"
    write_record(Record(phase="timing", spec=SPEC, status="ok", values={"latency_ms": 1.0}), path)
    assert parse(monkeypatch, "--spec", path, "--output", "results/b.json").spec == SPEC


@pytest.mark.parametrize("text", ['{"spec": ', "{}", "[]", "\x00"])
def test_a_file_that_is_no_record_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    said = refused(monkeypatch, capsys, path, "results/a.json")
    assert "--spec: neither JSON nor a record" in said
    assert "broken.json" in said


@pytest.mark.parametrize("spec", ['{"phase": ', "missing.json", ""])
def test_what_is_neither_json_nor_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    assert "--spec: neither JSON nor a record" in refused(monkeypatch, capsys, spec, "results/a.json")


def test_an_output_that_could_not_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(monkeypatch, capsys, json.dumps(SPEC), tmp_path / "a.json")
    assert "below a folder called results" in said


def test_tuned_options_go_on_top_of_the_specs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"options": {"tile": 128}}')
    required = ("--spec", json.dumps(SPEC), "--output", "results/a.json")
    found = parse(monkeypatch, *required, "--tuned", tuned)
    assert found.options == {"tile": 128, "stages": 2}
    assert found.spec == SPEC
    assert parse(monkeypatch, *required, "--tuned").options == OPTIONS


@pytest.mark.parametrize("text", [None, "{", "{}", "[]"])
def test_a_tuned_file_without_options_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None
) -> None:
    tuned = tmp_path / "tuned.json"
    if text is not None:
        tuned.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse(monkeypatch, "--spec", json.dumps(SPEC), "--output", "results/a.json", "--tuned", tuned)
    assert caught.value.code == 2
    assert "tuned.json does not say which options won" in capsys.readouterr().err


def test_a_spec_without_an_implementation_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--spec: it names no implementation" in refused(monkeypatch, capsys, "{}", "results/a.json")
