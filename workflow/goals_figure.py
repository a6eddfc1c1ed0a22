"""The figure of one goal: what was reached in each cell, against the line that was to be reached."""

from __future__ import annotations

import itertools
import math

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflow.figures import (
    FAINT,
    INK,
    LARGE,
    LINE_IN,
    NORMAL,
    SETTINGS,
    SMALL,
    Label,
    Style,
    _axes,
    _direct_labels,
    _marker,
    _svg,
    _width,
    _x_axis,
    styles_of,
)
from workflow.goals import counts, geometric_mean, goal_sentence
from workflow.tables import one_line

PANEL_WIDTH, PANEL_HEIGHT = 5.4, 3.4  # inches


def goal_figure(goals: pd.DataFrame, name: str) -> str:
    """The speedup against the fastest of the others in each cell of a goal, a line a sweep, as SVG text.

    A cell whose number does not count is hollow; one without a number breaks its sweep's line.
    """
    cells = goals[goals["goal"] == name]
    if cells.empty:
        raise ValueError(f"goal = {name!r}: the table has no such goal")
    sweeps = list(dict.fromkeys(cells["sweep"]))
    styles = styles_of(pd.DataFrame({"implementation": sweeps}))
    labels = {sweep: _label(sweep, cells[cells["sweep"] == sweep]) for sweep in sweeps}
    title = f"Goal {name}"
    notes = ["Above 1 it is the faster one. Points: medians of the processes' medians, cold cache."]
    if not cells.loc[cells["speedup"].notna()].apply(counts, axis=1).all():
        notes.append("Hollow: a number that does not count; the table says why.")
    notes.append(one_line(cells["environment"].iloc[0]))
    subtitle = goal_sentence(cells, one_line)
    left, top, bottom = 0.75, 0.75, 0.62 + LINE_IN * len(notes)
    right = max(_width(label, NORMAL) for label in labels.values()) + 0.5
    width = max(left + PANEL_WIDTH + right, _width(subtitle, NORMAL) + 0.3)
    height = top + PANEL_HEIGHT + bottom
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
        figure.text(0.12 / width, 1 - 0.22 / height, title, size=LARGE, weight="bold", va="center")
        figure.text(0.12 / width, 1 - 0.46 / height, subtitle, size=NORMAL, color=FAINT, va="center")
        axes = _axes(figure, left, bottom, PANEL_WIDTH, PANEL_HEIGHT)
        _x_axis(axes, sorted(set(cells["seq_len"])), PANEL_WIDTH)
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("speedup over the fastest of the others")
        _draw(figure, axes, cells, {sweep: (styles[sweep], labels[sweep]) for sweep in sweeps})
        for index, line in enumerate(reversed(notes)):
            figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
        return _svg(figure, title)


def _label(sweep: str, cells: pd.DataFrame) -> str:
    mean = geometric_mean(cells)
    return sweep if math.isnan(mean) else f"{sweep}, mean {mean:.3f}"


def _draw(figure: Figure, axes: Axes, cells: pd.DataFrame, looks: dict[str, tuple[Style, str]]) -> None:
    shown = cells["speedup"].dropna()
    if shown.empty:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no number to draw", transform=axes.transAxes, ha="center", color=FAINT)
        return
    wanted = float(cells["wanted"].iloc[0])  # nan where there is none
    lines = {"as fast": 1.0} if math.isnan(wanted) else {"as fast": 1.0, "the goal": wanted}
    if wanted == 1:
        lines = {"the goal: as fast": 1.0}
    low, high = min([*shown, *lines.values()]), max([*shown, *lines.values()])
    room = max(0.12 * (high - low), 0.02)
    axes.set_ylim(low - room, high + room)
    place = _widest_gap([float(seq_len) for seq_len in cells["seq_len"]])
    for text, value in lines.items():
        colour = INK if "goal" in text else FAINT
        axes.axhline(value, color=colour, lw=1.0, linestyle=(0, (4, 2)), zorder=2)
        axes.annotate(
            *(text, (place, value), (0, 3)),
            textcoords="offset points",
            ha="center",
            size=SMALL,
            color=colour,
        )
    labels = []
    for sweep, (style, label) in looks.items():
        mine = cells[cells["sweep"] == sweep].sort_values("seq_len")
        axes.plot(mine["seq_len"], mine["speedup"], color=style.colour, linestyle=style.dashes, lw=1.3)
        timed = mine[mine["speedup"].notna()]
        for row in timed.to_dict("records"):
            _marker(axes, row["seq_len"], row["speedup"], style, hollow=not counts(row))
        if len(timed):
            last = timed.iloc[-1]
            labels.append(Label(last["seq_len"], last["speedup"], [label], style, not counts(last)))
    _direct_labels(figure, axes, labels, PANEL_WIDTH)


def _widest_gap(seq_lens: list[float]) -> float:
    """The middle of the widest gap between neighbouring lengths, where no marker is."""
    ordered = sorted(set(seq_lens))
    if len(ordered) == 1:
        return ordered[0]
    low, high = max(itertools.pairwise(ordered), key=lambda pair: pair[1] / pair[0])
    return math.sqrt(low * high)
