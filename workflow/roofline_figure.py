"""The roofline figure: each implementation at each length, under what this machine was measured to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
    _plain,
    _svg,
    _width,
    styles_of,
)
from workflow.limits import WHERE_FROM, Evidence

PANEL_WIDTH, PANEL_HEIGHT = 5.4, 3.6  # inches
FAR = 10.0  # times the greatest intensity: a ridge that is further to the right would leave the panel empty


def roofline_figure(sweep: str, rows: Sequence[Evidence], every_name: Sequence[str] = ()) -> str:
    """Operations a second over operations a byte for the rows of one sweep, with the two roofs, as SVG.

    `every_name` are the implementations of the whole run in order, so that each looks as it does in the other
    figures. A point whose bytes were not counted is hollow: it may lie further to the left.
    """
    title = f"Roofline, sweep {sweep}"
    names = list(dict.fromkeys(row.implementation for row in rows))
    styles = styles_of(pd.DataFrame({"implementation": [*every_name, *names]}))
    sources = dict.fromkeys(row.bytes_from for row in rows)
    notes = [
        "Roofs: the bandwidth and the matrix rate that this run measured. Numbers: sequence lengths.",
        *(f"Bytes {source}: {WHERE_FROM[source]}." for source in sources),
    ]
    if not all(row.is_counted for row in rows):
        notes.append("Hollow: its bytes are a lower bound, so that it lies there or further to the left.")
    if _is_far(rows):
        notes.append(
            f"The matrix rate, {rows[0].matrix_rate / 1e12:.3g} TFLOP/s, is the roof from"
            f" {_ridge(rows):.3g} FLOP / byte on, to the right of this figure."
        )
    right = max([1.0, *(_width(_label(name, rows), NORMAL) + 0.5 for name in names)])
    left, top, bottom = 1.05, 0.5, 0.7 + LINE_IN * len(notes)
    width, height = left + PANEL_WIDTH + right, top + PANEL_HEIGHT + bottom
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
        figure.text(0.12 / width, 1 - 0.22 / height, title, size=LARGE, weight="bold", va="center")
        axes = _axes(figure, left, bottom, PANEL_WIDTH, PANEL_HEIGHT)
        axes.set_xlabel("operations for each byte moved (FLOP / byte)")
        axes.set_ylabel("throughput (TFLOP/s)")
        if rows:
            _draw(figure, axes, {name: styles[name] for name in names}, rows)
        else:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.text(0.5, 0.5, "no number to draw", transform=axes.transAxes, ha="center", color=FAINT)
        for index, line in enumerate(reversed(notes)):
            figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
        return _svg(figure, title)


def _ridge(rows: Sequence[Evidence]) -> float:
    """The intensity at which the two roofs meet."""
    return rows[0].matrix_rate / rows[0].bandwidth


def _is_far(rows: Sequence[Evidence]) -> bool:
    """Whether the ridge is so far to the right of all points that it is left out, as in a decode sweep."""
    return bool(rows) and _ridge(rows) > FAR * max(row.intensity for row in rows)


def _label(name: str, rows: Sequence[Evidence]) -> str:
    floor = any(row.is_floor for row in rows if row.implementation == name)
    return f"{name} (floor)" if floor else name


def _draw(figure: Figure, axes: Axes, styles: dict[str, Style], rows: Sequence[Evidence]) -> None:
    roof, slope = rows[0].matrix_rate / 1e12, rows[0].bandwidth / 1e12
    ridge, far = _ridge(rows), _is_far(rows)
    seen = [row.intensity for row in rows] + ([] if far else [ridge])
    low, high = min(seen) / 3, max(seen) * 3
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(row.rate for row in rows) / 1e12 / 2, min(roof, high * slope) * 2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0), numticks=30))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        axis.set_minor_formatter(NullFormatter())
    if far:
        axes.plot([low, high], [low * slope, high * slope], color=INK, lw=1.2)
    else:
        axes.plot([low, ridge, high], [low * slope, roof, roof], color=INK, lw=1.2)
        text = f"matrix rate {roof:.3g} TFLOP/s"
        axes.text(high / 1.1, roof * 1.08, text, size=SMALL, ha="right", va="bottom")
    place = low * 1.2 if far else max(low * 1.2, ridge / 6)  # where the roof is high above what is slow
    turn = math.degrees(math.atan(_steepness(axes)))
    axes.text(
        *(place, place * slope * 1.15, f"bandwidth {slope:.3g} TB/s"),
        size=SMALL,
        rotation=turn,
        rotation_mode="anchor",
    )
    labels, points = [], []
    for name, style in styles.items():
        mine = sorted((row for row in rows if row.implementation == name), key=lambda row: row.seq_len)
        places = [(row.intensity, row.rate / 1e12) for row in mine]
        for source in dict.fromkeys(row.bytes_from for row in mine):
            # A line from a bound to a count would show a move that nobody measured.
            line = [place for row, place in zip(mine, places, strict=True) if row.bytes_from == source]
            axes.plot(*zip(*line, strict=True), color=style.colour, linestyle=style.dashes, lw=1.0, alpha=0.6)
        for row, (x, y) in zip(mine, places, strict=True):
            _marker(axes, x, y, style, hollow=not row.is_counted)
            points.append((x, y, str(row.seq_len), style.colour))
        labels.append(Label(*places[-1], [_label(name, rows)], style))
    _name_points(axes, points)
    _direct_labels(figure, axes, labels, PANEL_WIDTH)


def _name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each point's text beside it, where it covers no other point or text; nothing where it would."""
    markers = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [(mx - 5, my - 5, mx + 5, my + 5) for mx, my in markers]
    for (x, y, text, colour), (mx, my) in zip(points, markers, strict=True):
        width, height = _width(text, SMALL) * 72, SMALL
        for dx, dy in ((6, -height - 2), (6, 3), (-width - 6, 3), (-width - 6, -height - 2)):
            box = (mx + dx, my + dy, mx + dx + width, my + dy + height)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(
                    *(text, (x, y), (dx, dy)),
                    textcoords="offset points",
                    size=SMALL,
                    color=colour,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.75},
                )
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _steepness(axes: Axes) -> float:
    """How steep a line of equal decades is as drawn."""
    x, y = axes.get_xlim(), axes.get_ylim()
    return (PANEL_HEIGHT / math.log10(y[1] / y[0])) / (PANEL_WIDTH / math.log10(x[1] / x[0]))
