"""report/sdpa_diagnostic.md and its figure: which explanation of SDPA's anomaly the records support.

The article's SDPA read 6 to 7.7 TFLOP/s in isolated runs and 12.6 in a sweep. Three explanations are held
against what was measured, each by a rule that stands on the page beside its numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.comparison import SLOWER, UNCLEAR, Comparison, Measured, Ratio, compare
from harness.kernel_names import short_kernel_name
from harness.record import FAULTS, MARKS, OK, Record
from workflow.figures import (
    COLOURS,
    FAINT,
    LARGE,
    LINE_IN,
    NORMAL,
    RULE,
    SETTINGS,
    SHAPES,
    SMALL,
    _svg,
    _width,
)
from workflow.plan import DIAGNOSTIC_BACKENDS, DIAGNOSTIC_PRIMINGS, Plan
from workflow.render import environment_line, problem_line
from workflow.story import bullets, listed
from workflow.tables import load, markdown, table_text

SUPPORTED = "SUPPORTED"
NOT_SUPPORTED = "NOT SUPPORTED"
EARLY, LATE = "early", "late"
ISOLATED, TWIN = "isolated", "isolated_again"
PRIMED = tuple(name for name in DIAGNOSTIC_PRIMINGS if name not in (ISOLATED, TWIN))
# Process medians further apart than this ask for an explanation: the metered clock alone spreads by 3 %.
NOTICEABLE = 0.03
# The clock explains a spread where cycles spread by less than this share of it.
EXPLAINED = 0.5
# An effect of this size that the intervals do not exclude leaves a question open.
LARGE_EFFECT = 0.1
KERNEL_SEPARATOR = " | "
ANOMALY = 1.5  # processes of one backend that differ by less show nothing like what the article saw

Cells = dict[tuple[str, str], Record]


@dataclass(frozen=True)
class Finding:
    """One explanation: what the data says of it, by which rule, and the numbers."""

    title: str
    verdict: str
    summary: str
    rule: str
    table: str


def load_cells(plan: Plan, root: Path) -> Cells:
    """The record of every (backend, priming)."""
    jobs = plan.diagnostic_jobs()
    return {(job.implementation, str(job.sweep)): load(job, root) for job in jobs}


def fault_lines(cells: Cells) -> list[str]:
    """A line for every record that is wrong, an error or a timeout."""
    return [
        f"{backend}, {priming}: {record.status}: {record.reason}"
        for (backend, priming), record in cells.items()
        if record.status in FAULTS
    ]


def findings(cells: Cells) -> list[Finding]:
    """The three explanations, in the order in which the article meets them."""
    return [cold_start(cells), backend_choice(cells), clocks(cells)]


def in_short(cells: Cells) -> list[str]:
    """The page's findings, a line each."""
    return [anomaly(cells), *(f"**{one.title}: {one.verdict}.** {one.summary}" for one in findings(cells))]


def anomaly(cells: Cells) -> str:
    """By how much processes of the same backend differ: what there is to explain."""
    ratios = {}
    for backend in DIAGNOSTIC_BACKENDS:
        medians = _process_medians(cells, backend)
        if medians:
            values = [ms for ms, _ in medians]
            ratios[backend] = max(values) / min(values)
    if not ratios:
        return "No backend gave a number."
    shown = listed(f"{backend} {ratio:.3f}" for backend, ratio in ratios.items())
    return (
        f"The slowest process median over the fastest of the same backend: {shown}."
        " In the article it was 1.6 to 2.1."
        + (
            " Nothing of that size happened here: what follows explains small differences only."
            if max(ratios.values()) < ANOMALY
            else ""
        )
    )


def measured(cells: Cells, backend: str, priming: str, when: str) -> Measured | None:
    """The samples of a cell, `early` or `late`; None where there are none."""
    record = cells[backend, priming]
    if record.status != OK:
        return None
    return Measured(record.samples[f"{when}_ms"], record.samples[f"{when}_sm_clock_mhz"])


def _process_medians(
    cells: Cells, backend: str, primings: Sequence[str] = tuple(DIAGNOSTIC_PRIMINGS)
) -> list[tuple[float, float | None]]:
    """Median milliseconds and cycles of each series of each process, cycles None without a clock."""
    found: list[tuple[float, float | None]] = []
    for priming, when in itertools.product(primings, (EARLY, LATE)):
        side = measured(cells, backend, priming, when)
        if side is None:
            continue
        for index, process in enumerate(side.latencies_ms):
            mhz = side.sm_clocks_mhz[index] if side.has_clocks else []
            cycles = [ms * clock * 1e3 for ms, clock in zip(process, mhz, strict=False)]
            found.append((median(process), median(cycles) if cycles else None))
    return found


def cold_start(cells: Cells) -> Finding:
    """Is the first thing in a process slower than what comes later, or after something else?"""
    rows, verdicts = [], []
    for backend in DIAGNOSTIC_BACKENDS:
        first = measured(cells, backend, ISOLATED, EARLY)
        twin = measured(cells, backend, TWIN, EARLY)
        if first is None:
            continue
        others = {f"first samples {priming}": measured(cells, backend, priming, EARLY) for priming in PRIMED}
        others["its own when warm"] = measured(cells, backend, ISOLATED, LATE)
        for name, other in others.items():
            if other is not None:
                found = compare(first, other, None if twin is None else (first, twin))
                verdicts.append((backend, name, found))
                rows.append({"backend": backend, "isolated, against": name, **_compared(found)})
    slower = [
        f"{backend} against {name}: {found.in_ms.ratio:.3f}"
        for backend, name, found in verdicts
        if found.verdict == SLOWER and found.in_ms is not None
    ]
    highs = [found.in_ms.high if found.in_ms is not None else None for _, _, found in verdicts]
    reach = max((high if high is not None else math.inf for high in highs), default=math.inf)
    if slower:
        verdict, summary = SUPPORTED, f"First samples of an isolated process are slower: {listed(slower)}."
    elif reach < 1 + LARGE_EFFECT:
        verdict = NOT_SUPPORTED
        summary = (
            "First samples of an isolated process are not found slower than others, and at most"
            f" {reach - 1:.1%} slower by the 99 % intervals of {len(verdicts)} comparisons."
        )
    else:
        verdict = UNCLEAR
        summary = "First samples of an isolated process are not found slower; not every interval excludes it."
    return Finding(
        "Cold start",
        verdict,
        summary,
        "Supported where the first samples of isolated processes are SLOWER than those after something else,"
        " or than their own when warm, in milliseconds and in cycles; not supported where none is and no"
        f" interval in milliseconds reaches {1 + LARGE_EFFECT:g}. The first call itself stands apart, in the"
        " table of what was measured.",
        markdown(rows) if rows else "",
    )


def _compared(found: Comparison) -> dict[str, str]:
    resolves = found.resolvable_difference
    return {
        "ratio (ms)": _ratio(found.in_ms),
        "ratio (cycles)": _ratio(found.in_cycles),
        "verdict": found.verdict,
        "resolves": "" if resolves is None else f"{resolves:.1%}",
        "why unclear": table_text(found.reason or ""),
    }


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.3f}"
    return f"{ratio.ratio:.3f} ({ratio.low:.3f} – {ratio.high:.3f})"


def backend_choice(cells: Cells) -> Finding:
    """Did `default` run other kernels in one process than in another?"""
    named = {
        backend: sorted(
            {names for priming in DIAGNOSTIC_PRIMINGS for names in _kernel_names(cells[backend, priming])}
        )
        for backend in DIAGNOSTIC_BACKENDS
    }
    speeds = {}
    for backend in DIAGNOSTIC_BACKENDS:
        sides = [measured(cells, backend, priming, LATE) for priming in DIAGNOSTIC_PRIMINGS]
        medians = [median(process) for side in sides if side is not None for process in side.latencies_ms]
        if medians:
            speeds[backend] = median(medians)
    default = named["default"]
    if not default:
        reasons = [
            cells["default", priming].values.get("kernel_names_reason") for priming in DIAGNOSTIC_PRIMINGS
        ]
        reason = next((one for one in reasons if one), "default has no number")
        verdict, summary = UNCLEAR, f"What `default` ran is not known: {table_text(reason)}."
    elif len(default) > 1:
        verdict, summary = SUPPORTED, f"`default` ran {len(default)} different sets of kernels."
    else:
        verdict = NOT_SUPPORTED
        same = [backend for backend in DIAGNOSTIC_BACKENDS[1:] if named[backend] == default]
        alike = f", those of {listed(same)}" if same else ""
        summary = f"`default` ran the same kernels in every process{alike}."
    forced = [backend for backend in speeds if backend != "default"]
    if len(forced) > 1:
        fastest, slowest = min(forced, key=speeds.__getitem__), max(forced, key=speeds.__getitem__)
        ratio = speeds[slowest] / speeds[fastest]
        summary += f" Another backend would show: {slowest} takes {ratio:.2f} times as long as {fastest}."
    rows = [
        {
            "backend": backend,
            "median when warm (ms)": f"{speeds[backend]:.4g}" if backend in speeds else "",
            "kernels of a call": "<br>".join(table_text(_short(one)) for one in named[backend]),
        }
        for backend in DIAGNOSTIC_BACKENDS
        if named[backend] or backend in speeds
    ]
    return Finding(
        "Backend choice",
        verdict,
        summary,
        "Supported where `default` ran different kernels in different processes; not supported where they"
        " were the same in all.",
        markdown(rows) if rows else "",
    )


def _short(names: str) -> str:
    return "; ".join(short_kernel_name(name) for name in names.split("; "))


def _kernel_names(record: Record) -> list[str]:
    names = record.values.get("kernel_names") if record.status == OK else None
    return str(names).split(KERNEL_SEPARATOR) if names else []


def clocks(cells: Cells) -> Finding:
    """Does a spread in milliseconds go away in cycles?"""
    rows, verdicts = [], {}
    for backend in DIAGNOSTIC_BACKENDS:
        medians = _process_medians(cells, backend)
        if len(medians) < 2:
            continue
        times = [ms for ms, _ in medians]
        cycles = [count for _, count in medians if count is not None]
        if len(cycles) == len(times):
            verdicts[backend] = _clock_verdict(times, cycles)
        rows.append(
            {
                "backend": backend,
                "medians": str(len(times)),
                "range (ms)": f"{max(times) / min(times) - 1:.1%}",
                "range (cycles)": f"{max(cycles) / min(cycles) - 1:.1%}" if cycles else "",
                "spread (ms)": f"{_spread(times):.2%}",
                "spread (cycles)": f"{_spread(cycles):.2%}" if cycles else "",
                "SM clock (MHz)": _clock_range(cells, backend),
                "so": verdicts.get(backend, "no clock to read"),
            }
        )
    explained = [backend for backend, text in verdicts.items() if text == "the clock"]
    others = [backend for backend, text in verdicts.items() if text == "not the clock"]
    if explained:
        verdict = SUPPORTED
        summary = f"In cycles most of the spread is gone: {listed(explained)}."
        summary += f" Not so for {listed(others)}." if others else ""
    elif not verdicts:
        verdict, summary = UNCLEAR, "No SM clock was read."
    else:
        verdict = NOT_SUPPORTED
        summary = (
            f"What spreads in milliseconds spreads in cycles too: {listed(others)}."
            if others
            else f"No backend's processes range by more than {NOTICEABLE:.0%}: there is nothing to explain."
        )
    return Finding(
        "Clocks",
        verdict,
        summary,
        f"Supported where a backend's process medians range by more than {NOTICEABLE:.0%} in milliseconds and"
        f" spread by less than {EXPLAINED:.0%} of that in cycles (standard deviations of the logarithms);"
        " cycles are milliseconds times the SM clock metered beside each sample.",
        markdown(rows) if rows else "",
    )


def _clock_verdict(times: list[float], cycles: list[float]) -> str:
    if max(times) / min(times) - 1 <= NOTICEABLE:
        return "nothing to explain"
    return "the clock" if _spread(cycles) < EXPLAINED * _spread(times) else "not the clock"


def _spread(values: Sequence[float]) -> float:
    return stdev(math.log(value) for value in values)


def _clock_range(cells: Cells, backend: str) -> str:
    medians = [
        median(process)
        for priming, when in itertools.product(DIAGNOSTIC_PRIMINGS, (EARLY, LATE))
        if (side := measured(cells, backend, priming, when)) is not None and side.has_clocks
        for process in side.sm_clocks_mhz
    ]
    return f"{min(medians):.0f} – {max(medians):.0f}" if medians else ""


def diagnostic_page(cells: Cells, environment: dict[str, Any], figure: str) -> str:
    """The page; `figure` is the figure's path relative to it."""
    some = next(iter(cells.values()))
    problem = pd.DataFrame([some.spec["problem"]])
    measured_at = pd.DataFrame(
        [
            {
                "_measured_at": record.started_at or None,
                "_commit": record.circumstances.get("source", {}).get("commit"),
                "_dirty": record.circumstances.get("source", {}).get("dirty"),
            }
            for record in cells.values()
        ]
    )
    settings = some.spec["diagnostic"]
    parts = [
        "# SDPA diagnostic",
        environment_line(environment, measured_at),
        f"{problem_line(problem)} seq_len {some.spec['problem']['seq_len_q']}.",
        f"Every backend in {some.spec['processes']} fresh processes each: first thing in the process (under"
        f" two names, an A/A test), after naive attention and after a matrix product"
        f" ({settings['priming_s']:g} s of it). {settings['samples']} samples right after the first call,"
        f" and again after {settings['warm_up_s']:g} s of the same loop.",
        "## In short",
        bullets(in_short(cells)),
        f"![process medians of each backend]({figure})",
        "## What was measured",
        markdown([_row(*key, record) for key, record in cells.items()]),
        bullets(f"`{mark}`: {MARKS[mark]}" for mark in MARKS if any(mark in r.marks for r in cells.values())),
    ]
    for finding in findings(cells):
        parts += [f"## {finding.title}: {finding.verdict}", finding.summary, finding.rule, finding.table]
    parts += ["## Backends that cannot run, and why", bullets(refusals(cells)) or "Every backend ran."]
    return "\n\n".join(part for part in parts if part) + "\n"


def refusals(cells: Cells) -> list[str]:
    """For each backend what keeps it from running, in the words of PyTorch or of the fault."""
    lines = []
    for backend in DIAGNOSTIC_BACKENDS:
        reasons: dict[str, list[str]] = {}
        for priming in DIAGNOSTIC_PRIMINGS:
            record = cells[backend, priming]
            if record.status != OK:
                reasons.setdefault(f"{record.status}: {record.reason}", []).append(priming)
        for reason, primings in reasons.items():
            where = "" if len(primings) == len(DIAGNOSTIC_PRIMINGS) else f" ({listed(primings)})"
            lines.append(f"{backend}{where}: {table_text(reason)}")
    return lines


def _row(backend: str, priming: str, record: Record) -> dict[str, str]:
    row = {"backend": backend, "before it": table_text(priming), "status": table_text(record.status)}
    names = ("first call (ms)", "first samples (ms)", "when warm (ms)", "warm, in cycles", "SM clock (MHz)")
    if record.status != OK:
        return {**row, **dict.fromkeys(names, ""), "marks": table_text(" ".join(record.marks))}
    samples = record.samples
    late = _process_medians({("", ""): record}, "", ("",))[len(samples["early_ms"]) :]
    cycles = [count for _, count in late if count is not None]
    clock = [median(process) for process in samples["late_sm_clock_mhz"] if process]
    values = (
        _span([process[0] for process in samples["first_call_ms"]]),
        _span([median(process) for process in samples["early_ms"]]),
        _span([ms for ms, _ in late]),
        _span(cycles, ".0f") if cycles else "",
        _span(clock, ".0f") if clock else "",
    )
    return {**row, **dict(zip(names, values, strict=True)), "marks": table_text(" ".join(record.marks))}


def _span(values: Sequence[float], form: str = ".4g") -> str:
    """The median of the processes, and the smallest and the largest."""
    return f"{median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def diagnostic_figure(cells: Cells) -> str:
    """Each process's medians about the median of its backend, in milliseconds and in cycles, as SVG."""
    keys = [key for key, record in cells.items() if record.status == OK]
    title = "SDPA: every process, about the median of its backend"
    notes = [
        "Hollow: right after the first call. Full: when warm. A point is the median of one process.",
        "In cycles of the SM clock, right, a moving clock changes nothing.",
    ]
    row_height, panel_width, gap, top = 0.2, 3.6, 0.5, 0.75
    left = max([1.2, *(_width(_name(key), NORMAL) + 0.3 for key in keys)])
    panel_height = max(1.0, row_height * len(keys))
    bottom = 0.75 + LINE_IN * len(notes)
    width, height = left + 2 * panel_width + gap + 0.2, top + panel_height + bottom
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
        figure.text(0.12 / width, 1 - 0.22 / height, title, size=LARGE, weight="bold", va="center")
        for panel, unit in enumerate(("milliseconds", "cycles")):
            x = left + panel * (panel_width + gap)
            place = (x / width, bottom / height, panel_width / width, panel_height / height)
            axes = figure.add_axes(place)
            _draw_panel(axes, cells, keys, panel)
            axes.set_title(unit, loc="left", size=NORMAL, weight="bold")
            axes.set_xlabel("difference from the backend's median (%)")
        for index, line in enumerate(reversed(notes)):
            figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
        return _svg(figure, title)


def _name(key: tuple[str, str]) -> str:
    return f"{key[0]}, {key[1].replace('_', ' ')}"


def _draw_panel(axes: Axes, cells: Cells, keys: list[tuple[str, str]], unit: int) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(max(len(keys), 1) - 0.5, -0.5)
    drawn = False
    for row, (backend, priming) in enumerate(keys):
        every = [values[unit] for values in _process_medians(cells, backend)]
        centre = median(value for value in every if value is not None) if None not in every else None
        own = [values[unit] for values in _process_medians(cells, backend, (priming,))]
        style = DIAGNOSTIC_BACKENDS.index(backend)
        for index, value in enumerate(own):
            if centre is None or value is None:
                continue
            drawn = True
            early = index < len(own) // 2
            axes.plot(
                [100 * (value / centre - 1)],
                [row + (-0.15 if early else 0.15)],
                linestyle="none",
                marker=SHAPES[style],
                markersize=4.5,
                markerfacecolor="white" if early else COLOURS[style],
                markeredgecolor=COLOURS[style],
                markeredgewidth=0.9,
            )
    if unit == 0:
        axes.set_yticks(range(len(keys)), [_name(key) for key in keys])
    else:
        axes.set_yticks([])
    axes.tick_params(axis="y", length=0)
    if not drawn:
        text = "no number to draw" if unit == 0 else "no SM clock to read"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
