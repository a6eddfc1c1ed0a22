"""The figure of one sweep in several environments: panels for each implementation, a line an environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from harness.record import OK
from workflow.figures import (
    FAINT,
    LARGE,
    LATENCY,
    LENGTH_WORDS,
    LINE_IN,
    MEMORY,
    NORMAL,
    SETTINGS,
    SMALL,
    THROUGHPUT,
    Label,
    Lane,
    Series,
    Style,
    _axes,
    _direct_labels,
    _draw,
    _empty_lanes,
    _last_value,
    _mark_lanes,
    _Quantity,
    _series,
    _strip,
    _svg,
    _width,
    _x_axis,
    _y_axis,
    _zero_lanes,
    styles_of,
)
from workflow.render import first_names, problem_line, rate_of, workload_of

PANEL_WIDTH, PANEL_HEIGHT = 3.1, 1.9  # inches
TOP, HEAD, BELOW = 0.75, 0.34, 0.42
SHOWN = {LATENCY: "latency_status", THROUGHPUT: "latency_status", MEMORY: "memory_status"}


@dataclass(frozen=True)
class _Panel:
    series: list[Series]
    lanes: list[Lane]

    @property
    def strip(self) -> float:
        return sum(lane.height for lane in self.lanes)


def collected_figure(rows: pd.DataFrame, sweep: str, names: dict[str, str]) -> str:
    """One sweep's latency, throughput and peak memory in each environment, as SVG text.

    `rows` are the sweep's table; `names` gives each environment's key its short name. A quantity
    that the sweep does not measure has no column, and an A/A test's second name no row.
    """
    title = f"{len(names)} environments, sweep {sweep}"
    mine = first_names(rows)
    with mpl.rc_context(SETTINGS):
        return _svg(_nothing(title) if mine.empty else _figure(title, mine, names), title)


def _nothing(title: str) -> Figure:
    """In place of a figure of a sweep that no environment was asked for."""
    figure = Figure(figsize=(5, 0.8), dpi=72, facecolor="white")
    figure.text(0.03, 0.68, title, size=LARGE, weight="bold", va="center")
    figure.text(0.03, 0.28, "no environment has lengths of this sweep", color=FAINT, va="center")
    return figure


def _figure(title: str, rows: pd.DataFrame, names: dict[str, str]) -> Figure:
    lines = rows.assign(line=rows["environment"].map(names))
    styles = styles_of(pd.DataFrame({"implementation": list(names.values())}))
    quantities = [one for one, column in SHOWN.items() if (lines[column].fillna("") != "").any()]
    implementations = [str(name) for name in dict.fromkeys(lines["implementation"])]
    panels = {
        (name, quantity): _panel(lines[lines["implementation"] == name], quantity, styles)
        for name in implementations
        for quantity in quantities
    }
    seq_lens = sorted({int(n) for n in lines["seq_len"]})
    length, unit = LENGTH_WORDS[workload_of(lines)], rate_of(lines).unit
    shown = {quantity: _Quantity(quantity, length, unit, None) for quantity in quantities}
    footnotes = _footnotes(lines, panels.values())
    lanes = [lane.name for panel in panels.values() for lane in panel.lanes]
    left = max([0.85, *(_width(name, SMALL) + 0.25 for name in lanes)])
    labels = {
        key: [_label(one, shown[key[1]].unit, seq_lens[-1]) for one in panel.series]
        for key, panel in panels.items()
    }
    texts = [line for several in labels.values() for label in several for line in label.lines]
    right = max([0.6, *(_width(text, NORMAL) + 0.45 for text in texts)])
    strips = {
        name: max([0.0, *(panels[name, quantity].strip for quantity in quantities)])
        for name in implementations
    }
    column = left + PANEL_WIDTH + right
    bottom = 0.45 + LINE_IN * len(footnotes)
    height = TOP + sum(HEAD + PANEL_HEIGHT + strips[name] + BELOW for name in implementations) + bottom
    subtitle = problem_line(lines)
    printed = ((title, LARGE * 1.1), (subtitle, NORMAL), *((line, SMALL) for line in footnotes))
    width = max([column * max(1, len(quantities)), *(_width(text, size) + 0.3 for text, size in printed)])
    figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
    figure.text(0.12 / width, 1 - 0.22 / height, title, size=LARGE, weight="bold", va="center")
    figure.text(0.12 / width, 1 - 0.46 / height, subtitle, size=NORMAL, color=FAINT, va="center")
    upper = height - TOP
    for name in implementations:
        floor = upper - HEAD - PANEL_HEIGHT
        for place, quantity in enumerate(quantities):
            # One scale for all implementations: panels of a column can be held against each other.
            scale = [one for other in implementations for one in panels[other, quantity].series]
            x, panel = column * place + left, panels[name, quantity]
            axes = _axes(figure, x, floor, PANEL_WIDTH, PANEL_HEIGHT)
            axes.set_title(name, loc="left", size=NORMAL, weight="bold")
            _x_axis(axes, seq_lens, PANEL_WIDTH)
            _y_axis(axes, scale, shown[quantity])
            axes.set_ylabel(axes.get_ylabel().split(" – ")[0], size=SMALL)
            axes.tick_params(labelsize=SMALL)
            for one in panel.series:
                # A line breaks where its environment has no number, and not where it was asked for none.
                _draw(axes, one, sorted({int(n) for n in lines.loc[lines["line"] == one.name, "seq_len"]}))
            if scale and not panel.series:
                axes.text(0.5, 0.5, "no number to draw", transform=axes.transAxes, ha="center", color=FAINT)
            _strip(figure, axes, panel.lanes, x, floor - panel.strip, PANEL_WIDTH)
            _direct_labels(figure, axes, labels[name, quantity], PANEL_WIDTH)
        upper = floor - strips[name] - BELOW
    for place in range(len(quantities)):
        middle = (column * place + left + PANEL_WIDTH / 2) / width
        figure.text(middle, (upper + 0.04) / height, f"{length} (tokens)", ha="center", va="center")
    for index, line in enumerate(reversed(footnotes)):
        figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
    return figure


def _panel(rows: pd.DataFrame, quantity: str, styles: dict[str, Style]) -> _Panel:
    """One implementation's panel: what figures.py draws of implementations is of environments here."""
    lines = rows.assign(implementation=rows["line"])
    series = [
        replace(_series(lines, str(name), styles[str(name)], quantity), laws=[], notes=[])
        for name in dict.fromkeys(lines["implementation"])
    ]
    lanes = _empty_lanes(lines, quantity) + _zero_lanes(lines, quantity)
    return _Panel([one for one in series if one.values], lanes + _mark_lanes(lines, quantity, styles))


def _label(one: Series, unit: str, last: int) -> Label:
    lines = [_last_value(one, unit, last)]
    return Label(one.seq_lens[-1], one.values[-1], lines, one.style, bool(one.hollow) and one.hollow[-1])


def _footnotes(rows: pd.DataFrame, panels: Any) -> list[str]:
    series: Sequence[Series] = [one for panel in panels for one in panel.series]
    lines = []
    timed = rows[rows["latency_status"] == OK]
    coverage = timed["interval_coverage"].min() if len(timed) else math.nan
    if not pd.isna(coverage):
        lines.append(
            f"Points: medians. Bars: the interval of the median (coverage at least {coverage:.1%}); where"
            " none is seen it is narrower than the marker. Latency: lower is better; throughput: higher."
        )
    lines.append(
        "Strips: × – no number, with its status and reason; markers – the numbers that carry the mark named"
        " at the left. The panels of a column have one scale. A length that was not asked for has no cross."
    )
    if any(any(one.hollow) for one in series):
        lines.append("Hollow markers: run by Triton's interpreter, not comparable with native numbers.")
    return lines
