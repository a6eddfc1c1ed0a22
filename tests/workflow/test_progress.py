"""How far a run is, and about how long the rest takes, from former runs and from this one."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from harness.record import OK, Record, write_record
from tests.workflow.checkout import Checkout, small_config
from workflow.progress import Estimate, Measurement, Progress, Tracker, last_duration_s, sentence, spelt


def record_of(path: Path, duration_s: float, started_at: str = "2026-12-01T10:00:00.000000Z") -> Path:
    values = {"latency_ms": 1.0}
    write_record(Record("timing", {}, OK, values=values, duration_s=duration_s, started_at=started_at), path)
    return path


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def tracker(clock: Clock, folder: Path, **former_s: float | None) -> Tracker:
    """Jobs 1, 2, ... of rules named by the words' beginnings, and how long they took before."""
    jobs = {
        number: Measurement(name.split("_")[0], folder / "results" / "machine" / f"{name}.json", seconds)
        for number, (name, seconds) in enumerate(former_s.items(), start=1)
    }
    return Tracker(jobs, clock)


def run(tracker: Tracker, clock: Clock, number: int, seconds: float) -> None:
    tracker.start(number)
    clock.now += seconds
    tracker.end(number)


class TestTheEstimate:
    def test_is_what_the_measurements_took_when_last_made(self, clock, tmp_path):
        assert tracker(clock, tmp_path, a_1=10.0, a_2=20.0).estimate() == Estimate(30.0, ("former runs",), 0)

    def test_takes_off_what_is_done_and_what_a_running_job_has_taken(self, clock, tmp_path):
        jobs = tracker(clock, tmp_path, a_1=10.0, a_2=20.0, a_3=5.0)
        run(jobs, clock, 1, 10.0)
        assert jobs.estimate().left_s == pytest.approx(25.0)
        jobs.start(2)
        clock.now += 8.0
        assert jobs.estimate().left_s == pytest.approx(17.0)
        clock.now += 100.0  # longer than ever: it may end any moment
        assert jobs.estimate().left_s == pytest.approx(5.0)

    def test_adds_what_a_job_takes_beside_its_measurement(self, clock, tmp_path):
        jobs = tracker(clock, tmp_path, a_1=10.0, a_2=10.0, a_3=10.0)
        record_of(jobs.measurements[1].record, duration_s=9.0)
        run(jobs, clock, 1, 12.0)
        assert jobs.estimate().left_s == pytest.approx(2 * (10.0 + 3.0))

    def test_of_what_was_never_measured_is_the_mean_of_this_runs_jobs_of_its_rule(self, clock, tmp_path):
        jobs = tracker(clock, tmp_path, a_1=None, a_2=None, a_3=None, b_1=None, b_2=7.0)
        run(jobs, clock, 1, 4.0)
        run(jobs, clock, 2, 6.0)
        assert jobs.estimate() == Estimate(5.0 + 7.0, ("former runs", "this run so far"), 1)

    def test_of_measurements_side_by_side_is_as_much_shorter(self, clock, tmp_path):
        jobs = tracker(clock, tmp_path, a_1=10.0, a_2=10.0, a_3=10.0, a_4=10.0)
        jobs.start(1)
        jobs.start(2)
        clock.now += 10.0
        jobs.end(1)
        jobs.end(2)
        assert jobs.estimate().left_s == pytest.approx(10.0)

    def test_is_none_where_nothing_is_known(self, clock, tmp_path):
        assert tracker(clock, tmp_path, a_1=None).estimate() is None

    def test_learns_nothing_from_a_job_that_did_not_measure(self, clock, tmp_path):
        jobs = tracker(clock, tmp_path, a_1=None, a_2=None)
        jobs.start(1)
        clock.now += 1.0
        jobs.end(1, measured=False)
        assert jobs.done == 1
        assert jobs.estimate() is None


def test_the_newest_record_counts_and_one_that_cannot_be_read_does_not(tmp_path):
    path = tmp_path / "results" / "machine" / "timing" / "32.json"
    assert last_duration_s(path) is None
    record_of(path, 3.0, "2026-12-01T10:00:00.000000Z")
    record_of(path, 4.0, "2026-12-02T10:00:00.000000Z")
    assert last_duration_s(path) == 4.0
    (newest,) = (path.parents[2] / "history").rglob("20261202*.json")
    newest.write_text("{")
    assert last_duration_s(path) == 3.0


def test_what_is_known_of_a_few_is_not_said_of_the_whole(clock, tmp_path):
    assert tracker(clock, tmp_path, a_1=10.0, b_1=None).estimate() is None
    assert tracker(clock, tmp_path, a_1=10.0, a_2=10.0, b_1=None).estimate().left_out == 1


def test_the_line_says_that_it_is_an_estimate_from_what_and_what_it_leaves_out():
    line = sentence(3, 10, Estimate(125.0, ("former runs",), 0), now=0.0)
    assert re.fullmatch(
        r"Measured 3 of 10; about 2 min left, until \d\d:\d\d \(estimated from former runs\)\.", line
    )
    line = sentence(3, 10, Estimate(125.0, ("former runs", "this run so far"), 2), now=0.0)
    assert line == (
        "Measured 3 of 10; at least about 2 min left (estimated from former runs and this run so far;"
        " 2 of a kind not measured before not counted)."
    )
    assert sentence(0, 10, None, now=0.0) == "Measured 0 of 10; how long the others take is not known yet."
    assert sentence(10, 10, Estimate(0.0, (), 0), now=0.0) == "Measured 10 of 10."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (89.0, "89 s"), (90.0, "2 min"), (5000.0, "83 min"), (7500.0, "2 h 05 min")],
)
def test_a_duration_is_no_more_exact_than_an_estimate(seconds, text):
    assert spelt(seconds) == text


def test_a_fault_of_the_estimate_ends_no_run(capsys):
    class Broken:
        @property
        def dag(self):
            raise RuntimeError("no DAG")

    said: list[str] = []
    event = logging.makeLogRecord({"event": "run_info"})
    Progress(Broken(), said.append).handle(event)
    assert said == []
    assert "no DAG" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    made = Checkout.make(tmp_path_factory.mktemp("progress"), "right")
    made.configure(small_config(a="right", b="right"))
    return made


def lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.match(r"Measured \d+ of", line)]


def test_a_run_says_how_far_it_is_in_its_output_and_in_its_log(checkout):
    first = checkout.snakemake("memory")
    assert first.returncode == 0, first.stdout
    counts = [re.match(r"Measured (\d+) of (\d+)", line).groups() for line in lines(first.stdout)]
    assert counts == [(str(done), "2") for done in range(3)]
    assert lines(first.stdout)[0].endswith("how long the others take is not known yet.")
    assert "(estimated from this run so far)" in lines(first.stdout)[1]
    (log,) = (checkout.folder / ".snakemake" / "log").glob("*.log")
    assert lines(log.read_text()) == lines(first.stdout)
    # What is measured and how many steps are done comes from Snakemake, before the line.
    order = [line for line in first.stdout.splitlines() if re.search("measure memory|steps|^Measured", line)]
    assert re.match("Job .*measure memory of [ab]", order[2])
    assert re.match(r"\d of \d steps", order[3])
    assert order[4].startswith("Measured 1 of 2")

    again = checkout.snakemake("-F", "memory")
    assert re.match(
        r"Measured 0 of 2; about \d+ s left, until \d\d:\d\d \(estimated from former runs\)",
        lines(again.stdout)[0],
    )
    assert "Nothing to be done" in checkout.snakemake("memory").stdout


def test_a_terminal_sees_the_same_and_quiet_silences_it(checkout):
    controller, terminal = pty.openpty()
    command = checkout.command("-F", "memory")
    environment = checkout.environment(TERM="xterm")
    with subprocess.Popen(
        command, cwd=checkout.folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ) as run:
        os.close(terminal)
        output = b""
        while True:
            try:
                output += os.read(controller, 65536)
            except OSError:  # the terminal's last user has gone
                break
        assert run.wait(timeout=300) == 0
    os.close(controller)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r", "")
    assert len(lines(plain)) == 3
    quiet = checkout.snakemake("-F", "memory", "--quiet", "progress", "host")
    assert quiet.returncode == 0
    assert lines(quiet.stdout) == []
