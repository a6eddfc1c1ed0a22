"""The figures of a run, as SVG text. Every mark on them comes from the two CSV files.

Sizes are fixed in inches, so that the same data gives the same bytes and no label depends on a
renderer. Text stays text: it can be searched, and a viewer without the font falls back to a narrower
one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from harness.problem import ATTENTION, DECODE
from harness.record import MARKS, OK
from workflow.render import GIB, prefill_cells, problem_line, rate_of, workload_of
from workflow.tables import one_line

LATENCY = "latency"
THROUGHPUT = "throughput"
MEMORY = "memory"
QUANTITIES = (LATENCY, THROUGHPUT, MEMORY)

# Okabe and Ito's colours that keep apart for every kind of colour vision, ordered so that neighbours
# differ in lightness too; shapes and dashes say the same once more, for print in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")
SHAPES = ("o", "s", "^", "D", "v", "P", "h", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (1.2, 1.2)))
INK, FAINT, RULE = "#222222", "#666666", "#dddddd"
# Marks that say something about time only; on a figure of memory they would mislead.
# All but those that are about the kernel or the record concern latencies alone.
MARKS_OF_MORE = (
    "interpreted",
    "not_attention",
    "stale",
    "grid_failed",
    "grid_incomplete",
    "not_deterministic",
)
MARKS_OF_TIME = tuple(mark for mark in MARKS if mark not in MARKS_OF_MORE)
# Shown by a hollow marker and in the label, so it needs no lane.
INTERPRETED = "interpreted"
LENGTH_WORDS = {ATTENTION: "sequence length", DECODE: "context length"}
LINEAR_UP_TO = 100  # largest over smallest value up to which a linear axis from 0 shows both

SMALL, NORMAL, LARGE = 7.5, 9.0, 12.0
LINE_IN = 0.15  # height of a line of small text
ERROR_SUBTITLE = (
    "Largest absolute difference from attention computed by PyTorch in the same dtype, over all batches of"
    " the grid."
)
GLYPH_LANE_IN, REASON_LANE_IN = 0.2, 0.36
STEP_IN = 0.13  # from one mark in a lane to the next
SETTINGS: Any = {
    "svg.hashsalt": "attention-bench",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": NORMAL,
    "text.color": INK,
    "text.parse_math": False,  # a kernel's message may hold a $
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Style:
    """How one implementation looks, in every figure alike."""

    colour: str
    shape: str
    dashes: Any
    size: float


@dataclass(frozen=True)
class Series:
    """One implementation's numbers in one panel."""

    name: str
    style: Style
    seq_lens: list[int]
    values: list[float]
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    hollow: list[bool] = field(default_factory=list)
    laws: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lane:
    """A row of the strip below a panel: what belongs to a seq_len and has no place on the y axis."""

    name: str
    seq_lens: list[int]
    glyph: str = ""
    text: str = ""
    styles: list[list[Style]] = field(default_factory=list)

    @property
    def height(self) -> float:
        return REASON_LANE_IN if self.text else GLYPH_LANE_IN


@dataclass(frozen=True)
class Label:
    """Text to the right of a panel, tied to a point of it."""

    seq_len: float
    value: float
    lines: list[str]
    style: Style
    hollow: bool = False


def styles_of(*tables: pd.DataFrame) -> dict[str, Style]:
    """A style for each implementation, in the order in which the tables first name it."""
    names = dict.fromkeys(name for table in tables for name in table["implementation"])
    return {
        str(name): Style(
            COLOURS[index % len(COLOURS)],
            SHAPES[index % len(SHAPES)],
            DASHES[index % len(DASHES)],
            # Where numbers coincide, the larger marker shows behind the smaller.
            max(4.5, 8.0 - 1.2 * index),
        )
        for index, name in enumerate(names)
    }


def sweep_figure(benchmark: pd.DataFrame, grid: pd.DataFrame, sweep: str, quantity: str) -> str:
    """One sweep's latency, throughput or memory against seq_len, as SVG text."""
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity = {quantity!r}: must be one of {', '.join(QUANTITIES)}")
    rows = benchmark[benchmark["sweep"] == sweep]
    if rows.empty:
        raise ValueError(f"sweep = {sweep!r}: the table has no such sweep")
    styles = styles_of(grid, benchmark)
    series = [_series(rows, name, styles[name], quantity) for name in dict.fromkeys(rows["implementation"])]
    lanes = _empty_lanes(rows, quantity) + _zero_lanes(rows, quantity) + _mark_lanes(rows, quantity, styles)
    length = LENGTH_WORDS[workload_of(rows)]
    subject = {LATENCY: "Latency", THROUGHPUT: "Throughput", MEMORY: "Peak memory"}[quantity]
    title = f"{subject} against {length}, sweep {sweep}"
    with mpl.rc_context(SETTINGS):
        figure = _sweep_figure(
            title,
            problem_line(rows),
            sorted(set(rows["seq_len"])),
            [one for one in series if one.values],
            lanes,
            _Quantity(quantity, length, rate_of(rows).unit, _bandwidth(rows, quantity)),
            _footnotes(rows, quantity, series),
        )
        return _svg(figure, title)


@dataclass(frozen=True)
class _Quantity:
    """What a sweep's figure shows; `bandwidth` is the measured one, in `rate_unit`, where that bounds it."""

    name: str
    length: str
    rate_unit: str
    bandwidth: float | None

    @property
    def unit(self) -> str:
        return {LATENCY: "ms", THROUGHPUT: self.rate_unit, MEMORY: "GiB"}[self.name]


def _bandwidth(rows: pd.DataFrame, quantity: str) -> float | None:
    """TB/s that reading reached in the run, for a figure of decode's throughput."""
    if quantity != THROUGHPUT or workload_of(rows) != DECODE:
        return None
    merit = rate_of(rows)
    found = (rows[merit.column] / merit.divisor / rows["share_of_read_bandwidth"]).dropna()
    return float(found.iloc[0]) if len(found) else None


def _series(rows: pd.DataFrame, name: str, style: Style, quantity: str) -> Series:
    phase = MEMORY if quantity == MEMORY else LATENCY
    mine = rows[(rows["implementation"] == name) & (rows[f"{phase}_status"] == OK)].sort_values("seq_len")
    if quantity == MEMORY:
        mine = mine[mine["peak_memory_bytes"] > 0]  # 0 has no place on a logarithmic axis: a lane shows it
    seq_lens = [int(n) for n in mine["seq_len"]]
    hollow = [INTERPRETED in _marks(marks) for marks in mine["marks"]]
    notes = ["interpreted (hollow)"] if any(hollow) else []
    if quantity == MEMORY:
        workspace = _workspace_note(mine["workspace_bytes"].dropna())
        return Series(
            name,
            style,
            seq_lens,
            [float(count) / GIB for count in mine["peak_memory_bytes"]],
            hollow=hollow,
            laws=list(pd.to_numeric(mine["law_bytes"]) / GIB),  # not a number where no law is known
            notes=notes + ([workspace] if workspace else []),
        )
    values = mine["latency_ms"]
    lows, highs = mine["latency_low_ms"], mine["latency_high_ms"]
    if quantity == THROUGHPUT:
        # The operations are fixed: the interval of the rate is that of the latency, turned over.
        merit = rate_of(rows)
        rate = mine[merit.column] / merit.divisor
        values, lows, highs = rate, rate * values / highs, rate * values / lows
    return Series(
        name,
        style,
        seq_lens,
        [float(value) for value in values],
        [float(value) for value in lows],
        [float(value) for value in highs],
        hollow,
        notes=notes,
    )


def _workspace_note(counts: pd.Series) -> str:
    sizes = sorted({f"{count / 2**20:.4g}" for count in counts if count > 0}, key=float)
    if not sizes:
        return ""
    some = "" if (counts > 0).all() else "up to "
    span = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"with {some}{span} MiB of workspace"


def _marks(marks: Any) -> list[str]:
    return [] if pd.isna(marks) else str(marks).split()


def _empty_lanes(rows: pd.DataFrame, quantity: str) -> list[Lane]:
    """A lane for each implementation and reason for which a number is missing."""
    phase = MEMORY if quantity == MEMORY else LATENCY
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows.sort_values("seq_len").to_dict("records"):
        status, reason = row[f"{phase}_status"], row[f"{phase}_reason"]
        if status == OK:
            continue
        text = "not measured" if pd.isna(status) or not status else str(status)
        if not pd.isna(reason) and reason:
            text += f": {one_line(reason)}"
        found.setdefault((str(row["implementation"]), text), []).append(int(row["seq_len"]))
    order = list(dict.fromkeys(rows["implementation"]))
    keys = sorted(found, key=lambda key: order.index(key[0]))
    return [Lane(name, found[name, text], "×", text) for name, text in keys]


def _zero_lanes(rows: pd.DataFrame, quantity: str) -> list[Lane]:
    """A lane for each implementation of which a peak of 0 bytes was measured."""
    if quantity != MEMORY:
        return []
    zero = rows[(rows["memory_status"] == OK) & (rows["peak_memory_bytes"] <= 0)]
    return [
        Lane(str(name), sorted(int(n) for n in mine["seq_len"]), "0", "measured: 0 bytes")
        for name, mine in zero.groupby("implementation", sort=False)
    ]


def _mark_lanes(rows: pd.DataFrame, quantity: str, styles: dict[str, Style]) -> list[Lane]:
    """A lane for each mark: which implementations carry it, at which seq_len."""
    phase = MEMORY if quantity == MEMORY else LATENCY
    hidden = (INTERPRETED, *(MARKS_OF_TIME if quantity == MEMORY else ()))
    found: dict[str, dict[int, list[Style]]] = {}
    for row in rows[rows[f"{phase}_status"] == OK].to_dict("records"):
        for mark in _marks(row["marks"]):
            if mark not in hidden:
                cells = found.setdefault(mark, {})
                cells.setdefault(int(row["seq_len"]), []).append(styles[str(row["implementation"])])
    return [
        Lane(mark, sorted(cells), styles=[cells[n] for n in sorted(cells)])
        for mark, cells in sorted(found.items())
    ]


def _footnotes(rows: pd.DataFrame, quantity: str, series: Sequence[Series]) -> list[str]:
    lines = []
    if quantity == MEMORY:
        if any(not math.isnan(law) for one in series for law in one.laws):
            lines.append(
                "Thin dashed lines: the memory law of each kernel, by arithmetic and without workspace."
            )
    else:
        coverage = rows["interval_coverage"].min()
        if not pd.isna(coverage):
            lines.append(
                f"Points: medians. Bars: the interval of the median (coverage at least {coverage:.1%});"
                " where none is seen it is narrower than the marker."
            )
    if any(any(one.hollow) for one in series):
        lines.append("Hollow markers: run by Triton's interpreter, not comparable with native numbers.")
    if "environment" in rows:
        lines.append(one_line(rows["environment"].iloc[0]))
    return lines


def _sweep_figure(
    title: str,
    subtitle: str,
    seq_lens: list[int],
    series: list[Series],
    lanes: list[Lane],
    quantity: _Quantity,
    footnotes: list[str],
) -> Figure:
    labels = [
        Label(
            one.seq_lens[-1],
            one.values[-1],
            [_last_value(one, quantity.unit, seq_lens[-1]), *one.notes],
            one.style,
            one.hollow[-1],
        )
        for one in series
    ]
    lines = [line for label in labels for line in label.lines]
    left = max([1.05, *(_width(lane.name, SMALL) + 0.25 for lane in lanes)])
    right = max([1.0, *(_width(line, NORMAL) + 0.5 for line in lines)])
    panel_width, panel_height = 5.4, 3.4
    texts = ((title, LARGE * 1.1), (subtitle, NORMAL), *((line, SMALL) for line in footnotes))
    width = max([left + panel_width + right, *(_width(text, size) + 0.3 for text, size in texts)])
    strip = sum(lane.height for lane in lanes)
    top, bottom = 0.75, 0.62 + LINE_IN * len(footnotes)
    height = top + panel_height + strip + bottom
    figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
    figure.text(0.12 / width, 1 - 0.22 / height, title, size=LARGE, weight="bold", va="center")
    figure.text(0.12 / width, 1 - 0.46 / height, subtitle, size=NORMAL, color=FAINT, va="center")
    axes = _axes(figure, left, bottom + strip, panel_width, panel_height)
    _x_axis(axes, seq_lens, panel_width)
    _y_axis(axes, series, quantity)
    for one in series:
        _draw(axes, one, seq_lens)
    _strip(figure, axes, lanes, left, bottom, panel_width)
    _direct_labels(figure, axes, labels, panel_width)
    figure.text(
        (left + panel_width / 2) / width,
        (bottom - 0.45) / height,
        f"{quantity.length} (tokens)",
        ha="center",
        va="center",
    )
    for index, line in enumerate(reversed(footnotes)):
        figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
    return figure


def _last_value(one: Series, unit: str, last: int) -> str:
    where = "" if one.seq_lens[-1] == last else f" at {one.seq_lens[-1]}"
    value = one.values[-1]
    return f"{one.name} {f'{value:.0f}' if value >= 1000 else f'{value:.3g}'} {unit}{where}"


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches from the figure's lower left corner."""
    total_width, total_height = figure.get_size_inches()
    axes = figure.add_axes(
        (left / total_width, bottom / total_height, width / total_width, height / total_height)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _x_axis(axes: Axes, seq_lens: list[int], width: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(seq_lens[0] / 2**0.4, seq_lens[-1] * 2**0.4)
    octaves = math.log2(seq_lens[-1] / seq_lens[0]) + 0.8
    texts: list[str] = []
    taken = [-math.inf, -math.inf]  # right ends, in inches, of the two lines of tick labels
    for n in seq_lens:
        centre = (math.log2(n / seq_lens[0]) + 0.4) / octaves * width
        half = _width(str(n), NORMAL) / 2 + 0.04
        line = 0 if centre - half >= taken[0] or taken[0] <= taken[1] else 1
        taken[line] = centre + half
        texts.append("\n" * line + str(n))
    axes.xaxis.set_major_locator(FixedLocator(seq_lens))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(seq_lens, texts)


def _y_axis(axes: Axes, series: Sequence[Series], quantity: _Quantity) -> None:
    names = {
        LATENCY: "latency (ms) – lower is better",
        THROUGHPUT: f"throughput ({quantity.rate_unit}) – higher is better",
        MEMORY: "peak memory (GiB) – lower is better",
    }
    axes.set_ylabel(names[quantity.name])
    values = [
        value
        for one in series
        for value in (*one.values, *one.lows, *one.highs, *one.laws)
        if math.isfinite(value) and value > 0
    ]
    if not values:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no number to draw", transform=axes.transAxes, ha="center", color=FAINT)
        return
    if quantity.bandwidth is not None:
        values.append(quantity.bandwidth)
        axes.axhline(quantity.bandwidth, color=FAINT, linestyle=(0, (4, 2)), lw=0.9, zorder=2)
        axes.annotate(
            f"bandwidth of reading, measured: {quantity.bandwidth:.3g} {quantity.rate_unit}",
            (0.01, quantity.bandwidth),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            size=SMALL,
            color=FAINT,
            va="bottom",
        )
    smallest, largest = min(values), max(values)
    if quantity.name == THROUGHPUT and largest / smallest <= LINEAR_UP_TO:
        axes.set_ylim(0, largest * 1.08)
        return
    axes.set_yscale("log")
    axes.set_ylim(smallest / 1.5, largest * 1.5)
    decades = math.log10(largest / smallest * 2.25)
    subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.7 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw(axes: Axes, one: Series, seq_lens: Sequence[int]) -> None:
    style = one.style
    faint = 0.5 if one.laws else 1.0
    # A length without a number breaks the line: nothing was measured there.
    line = dict(zip(one.seq_lens, one.values, strict=True))
    values = [line.get(n, math.nan) for n in seq_lens]
    axes.plot(seq_lens, values, color=style.colour, linestyle=style.dashes, lw=1.3, alpha=faint)
    for index, (seq_len, value) in enumerate(zip(one.seq_lens, one.values, strict=True)):
        if one.lows:
            # Where a process's median is the median, a throughput's end may be rounded past it.
            bars = [[max(0.0, value - one.lows[index])], [max(0.0, one.highs[index] - value)]]
            axes.errorbar(seq_len, value, yerr=bars, color=style.colour, capsize=4, lw=1.1, zorder=3)
        _marker(axes, seq_len, value, style, bool(one.hollow) and one.hollow[index])
    if one.laws:
        axes.plot(one.seq_lens, one.laws, color=INK, linestyle=(0, (4, 2)), lw=0.8, zorder=5)


def _marker(axes: Axes, x: float, y: float, style: Style, hollow: bool = False, **options: Any) -> None:
    axes.plot(
        [x],
        [y],
        linestyle="none",
        marker=style.shape,
        markersize=style.size,
        markerfacecolor="white" if hollow else style.colour,
        markeredgecolor=style.colour if hollow else "white",
        markeredgewidth=1.4 if hollow else 0.6,
        zorder=4,
        **options,
    )


def _strip(
    figure: Figure, above: Axes, lanes: Sequence[Lane], left: float, bottom: float, width: float
) -> None:
    """Draw the lanes below a panel, and move the panel's tick labels below them."""
    if not lanes:
        return
    height = sum(lane.height for lane in lanes)
    axes = _axes(figure, left, bottom, width, height)
    axes.set_facecolor("#f5f5f5")
    axes.set_xscale("log", base=2)
    axes.set_xlim(*above.get_xlim())
    axes.set_ylim(0, height)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = [float(tick) for tick in above.get_xticks()]
    axes.set_xticks(ticks, [label.get_text() for label in above.get_xticklabels()])
    above.tick_params(axis="x", labelbottom=False, length=0)
    axes.grid(False, axis="y")
    octaves = math.log2(above.get_xlim()[1] / above.get_xlim()[0])
    upper, centres = height, []
    for lane in lanes:
        centre = upper - GLYPH_LANE_IN / 2
        centres.append(centre)
        groups = lane.styles or [[] for _ in lane.seq_lens]
        wanted = [math.log2(n / above.get_xlim()[0]) / octaves * width for n in lane.seq_lens]
        places = spread(wanted, [STEP_IN * max(1, len(group)) for group in groups])
        for middle, group in zip(places, groups, strict=True):
            if lane.glyph:
                x = above.get_xlim()[0] * 2 ** (middle / width * octaves)
                axes.text(x, centre, lane.glyph, ha="center", va="center", weight="bold")
            for place, style in enumerate(group):
                beside = middle + (place - (len(group) - 1) / 2) * STEP_IN
                _marker(axes, above.get_xlim()[0] * 2 ** (beside / width * octaves), centre, style)
        if lane.text:
            _lane_text(axes, lane, upper - GLYPH_LANE_IN - 0.06, width, octaves)
        upper -= lane.height
        axes.axhline(upper, color=RULE, linewidth=0.6)
    axes.set_yticks(centres, [lane.name for lane in lanes], size=SMALL)
    axes.tick_params(axis="y", length=0)


def _lane_text(axes: Axes, lane: Lane, y: float, width: float, octaves: float) -> None:
    """The reason, beginning below the lane's first cross if there is room, else ending at the right."""
    text = _fitting(lane.text, width - 0.1)
    low, high = axes.get_xlim()
    start = math.log2(lane.seq_lens[0] / low) / octaves * width - 0.06
    if start + _width(text, SMALL) < width:
        axes.text(low * 2 ** (start / width * octaves), y, text, size=SMALL, va="center")
    else:
        axes.text(high * 2 ** (-0.05 / width * octaves), y, text, size=SMALL, va="center", ha="right")


def _fitting(text: str, width: float) -> str:
    """The text, cut so that it is no wider than this in small print."""
    kept = text[: int(width / 0.02)]  # no letter is narrower than 0.02 inches, and reasons can be long
    while _width(cut := kept if kept == text else kept.rstrip() + "…", SMALL) > width:
        too_wide = 1 - width / _width(cut, SMALL)
        kept = kept[: len(kept) - max(1, int(len(kept) * too_wide * 0.8))]
    return cut


def _direct_labels(figure: Figure, axes: Axes, labels: Sequence[Label], width: float) -> None:
    """Write each label beside the panel, near its point, moved just so far that none overlap."""
    total_width, total_height = figure.get_size_inches()
    box = axes.get_position()
    right = box.x1 * total_width
    points = [axes.transData.transform((label.seq_len, label.value)) / figure.dpi for label in labels]
    heights = [LINE_IN * 1.1 * len(label.lines) for label in labels]
    centres = spread([float(point[1]) for point in points], heights, box.y0 * total_height)
    for label, point, centre, height in zip(labels, points, centres, heights, strict=True):
        first_line = centre + height / 2 - LINE_IN * 1.1 / 2
        figure.add_artist(
            mpl.lines.Line2D(
                [float(point[0]) / total_width, (right + 0.1) / total_width],
                [float(point[1]) / total_height, first_line / total_height],
                color=label.style.colour,
                lw=0.6,
                linestyle=(0, (1, 1.5)),
            )
        )
        sample = mpl.lines.Line2D(
            [(right + 0.17) / total_width],
            [first_line / total_height],
            linestyle="none",
            marker=label.style.shape,
            markersize=6,
            markerfacecolor="white" if label.hollow else label.style.colour,
            markeredgecolor=label.style.colour,
            markeredgewidth=1.4 if label.style.shape == "_" or label.hollow else 0.6,
        )
        figure.add_artist(sample)
        for index, line in enumerate(label.lines):
            figure.text(
                (right + 0.28) / total_width,
                (first_line - index * LINE_IN * 1.1) / total_height,
                line,
                va="center_baseline",
                size=NORMAL if index == 0 else SMALL,
                color=INK if index == 0 else FAINT,
            )


def spread(wanted: Sequence[float], heights: Sequence[float], floor: float = -math.inf) -> list[float]:
    """Centres as near as possible to the wanted ones such that boxes of these heights do not overlap.

    Overlapping neighbours are pooled into one block around their mean (least squares under the order
    of the wanted centres); no box reaches below `floor`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # lower edge, members from below
    for index in order:
        block = (wanted[index] - heights[index] / 2, [index])
        block = (max(block[0], floor), block[1])
        while blocks and blocks[-1][0] + sum(heights[i] for i in blocks[-1][1]) > block[0]:
            members = blocks.pop()[1] + block[1]
            offsets = [
                wanted[i] - sum(heights[j] for j in members[:place]) - heights[i] / 2
                for place, i in enumerate(members)
            ]
            block = (max(sum(offsets) / len(offsets), floor), members)
        blocks.append(block)
    centres = [0.0] * len(wanted)
    for lower, members in blocks:
        for index in members:
            centres[index] = lower + heights[index] / 2
            lower += heights[index]
    return centres


def error_figure(grid: pd.DataFrame) -> str:
    """Maximum error against seq_len, a panel for each mask, head_dim and dtype, as SVG text."""
    if len(prefill := prefill_cells(grid)):
        grid = prefill
    styles = styles_of(grid)
    rows = [
        (head_dim, causal)
        for head_dim in sorted(set(grid["head_dim"]))
        for causal in sorted(set(grid["causal"].astype(bool)))
    ]
    dtypes = list(dict.fromkeys(grid["dtype"]))
    with mpl.rc_context(SETTINGS):
        figure = _error_figure(grid, rows, dtypes, styles)
        return _svg(figure, f"Maximum error against {LENGTH_WORDS[workload_of(grid)]}")


def row_zero_note(grid: pd.DataFrame) -> str:
    """Where the causal errors lie, held against the article, which puts them down to row 0.

    Nothing for decode, whose first query sees almost all keys.
    """
    grid = prefill_cells(grid)
    chosen = (grid["status"] == OK) & (grid["max_abs_error"] > 0) & grid["causal"].astype(bool)
    rows = grid.loc[chosen, "error_row"].astype(int)
    if rows.empty:
        return ""
    zero = int((rows == 0).sum())
    where = f"row {rows.min()}" if rows.nunique() == 1 else f"rows {rows.min()} to {rows.max()}"
    return (
        f"With the causal mask {zero} of {len(rows)} largest errors lie in row 0, which sees one key and to"
        f" which the article puts them down; they lie in {where}."
    )


@dataclass(frozen=True)
class _ErrorPanel:
    title: str
    series: list[Series]
    lanes: list[Lane]
    worst: list[dict[Any, Any]]  # at each seq_len the cell with the largest error, if any is above 0


def _error_figure(
    grid: pd.DataFrame, rows: list[tuple[int, bool]], dtypes: list[str], styles: dict[str, Style]
) -> Figure:
    panels = {
        (row, dtype): _error_panel(grid, row[0], row[1], dtype, styles) for row in rows for dtype in dtypes
    }
    names = [lane.name for panel in panels.values() for lane in panel.lanes]
    left = max([1.4, *(_width(name, SMALL) + 0.25 for name in names)])
    right = max(
        1.35, *(_width(one.name, NORMAL) + 0.45 for panel in panels.values() for one in panel.series), 0.0
    )
    panel_width, panel_height = 3.7, 2.0
    column = left + panel_width + right
    strips = [max(sum(lane.height for lane in panels[row, dtype].lanes) for dtype in dtypes) for row in rows]
    notes = _error_notes(grid)
    top, below, head = 0.8, 0.5, 0.3
    bottom = 0.4 + LINE_IN * len(notes)
    height = top + sum(head + panel_height + strip + below for strip in strips) + bottom
    texts = [*((note, SMALL) for note in notes), (ERROR_SUBTITLE, NORMAL), (row_zero_note(grid), NORMAL)]
    width = max(column * len(dtypes), *(_width(text, size) + 0.3 for text, size in texts))
    figure = Figure(figsize=(width, height), dpi=72, facecolor="white")
    figure.text(
        0.12 / width,
        1 - 0.22 / height,
        f"Maximum error against {LENGTH_WORDS[workload_of(grid)]}",
        size=LARGE,
        weight="bold",
        va="center",
    )
    figure.text(
        0.12 / width,
        1 - 0.44 / height,
        ERROR_SUBTITLE,
        color=FAINT,
        va="center",
    )
    figure.text(0.12 / width, 1 - 0.62 / height, row_zero_note(grid), color=INK, va="center")
    seq_lens = sorted({int(n) for n in grid["seq_len"]})
    upper = height - top
    for row, strip in zip(rows, strips, strict=True):
        for index, dtype in enumerate(dtypes):
            panel = panels[row, dtype]
            limits = _error_limits([panels[other, dtype] for other in rows])
            x = column * index + left
            axes = _axes(figure, x, upper - head - panel_height, panel_width, panel_height)
            _draw_error_panel(figure, axes, panel, seq_lens, limits, panel_width)
            own = sum(lane.height for lane in panel.lanes)
            _strip(figure, axes, panel.lanes, x, upper - head - panel_height - own, panel_width)
        upper -= head + panel_height + strip + below
    for index in range(len(dtypes)):
        figure.text(
            (column * index + left + panel_width / 2) / width,
            (upper - 0.05) / height,
            f"{LENGTH_WORDS[workload_of(grid)]} (tokens)",
            ha="center",
            va="center",
        )
    for index, line in enumerate(reversed(notes)):
        figure.text(0.12 / width, (0.1 + LINE_IN * index) / height, line, size=SMALL, color=FAINT)
    return figure


def _error_panel(
    grid: pd.DataFrame, head_dim: int, causal: bool, dtype: str, styles: dict[str, Style]
) -> _ErrorPanel:
    chosen = (grid["head_dim"] == head_dim) & (grid["causal"].astype(bool) == causal)
    cells = grid[chosen & (grid["dtype"] == dtype)].sort_values("seq_len", kind="stable")
    right = cells[(cells["status"] == OK) & cells["max_abs_error"].notna()]
    series, lanes = [], []
    for name in dict.fromkeys(cells["implementation"]):
        largest = right[right["implementation"] == name].groupby("seq_len")["max_abs_error"].max()
        above = largest[largest > 0]
        if len(above):
            marks = right.loc[right["implementation"] == name, "marks"]
            hollow = any(INTERPRETED in _marks(one) for one in marks)
            values = [float(value) for value in above]
            series.append(
                Series(
                    str(name),
                    styles[str(name)],
                    [int(n) for n in above.index],
                    values,
                    hollow=[hollow] * len(values),
                )
            )
        if (largest == 0).any():
            lanes.append(Lane(str(name), [int(n) for n in largest[largest == 0].index], "0"))
        lanes += _error_lanes(cells[(cells["implementation"] == name) & (cells["status"] != OK)], str(name))
    positive = right[right["max_abs_error"] > 0]
    worst = [
        positive.loc[group["max_abs_error"].idxmax()].to_dict() for _, group in positive.groupby("seq_len")
    ]
    mask = "causal" if causal else "not causal"
    return _ErrorPanel(f"{dtype}, {mask}, head_dim {head_dim}", series, lanes, worst)


def _error_lanes(cells: pd.DataFrame, name: str) -> list[Lane]:
    """A lane for each status; of several reasons the first is written, and that there are others."""
    lanes = []
    for status, rows in cells.groupby("status", sort=False):
        reasons = list(dict.fromkeys(one_line(reason) for reason in rows["reason"].dropna()))
        text = str(status)
        if reasons:
            more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
            text += f"{more}: {reasons[0]}"
        lanes.append(Lane(name, sorted({int(n) for n in rows["seq_len"]}), "×", text))
    return lanes


def _error_limits(panels: Sequence[_ErrorPanel]) -> tuple[float, float]:
    values = [value for panel in panels for one in panel.series for value in one.values]
    values += [float(cell["unit_in_last_place"]) for panel in panels for cell in panel.worst]
    if not values:
        return 2.0**-10, 2.0**-5
    return min(values) / 1.9, max(values) * 2.2


def _draw_error_panel(
    figure: Figure,
    axes: Axes,
    panel: _ErrorPanel,
    seq_lens: list[int],
    limits: tuple[float, float],
    width: float,
) -> None:
    axes.set_title(panel.title, loc="left", size=NORMAL, weight="bold")
    _x_axis(axes, seq_lens, width)
    axes.set_yscale("log", base=2)
    axes.set_ylim(*limits)
    powers = range(math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[1])) + 1)
    step = max(1, math.ceil(len(powers) / 7))
    ticks = [2.0**power for power in powers[::step]]
    axes.set_yticks(ticks, [f"{_plain(tick)} = 2{_superscript(round(math.log2(tick)))}" for tick in ticks])
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("maximum error", size=SMALL)
    for one in panel.series:
        _draw(axes, one, seq_lens)
    labels = [
        Label(
            one.seq_lens[-1],
            one.values[-1],
            [one.name, *(["interpreted (hollow)"] if one.hollow[-1] else [])],
            one.style,
            one.hollow[-1],
        )
        for one in panel.series
    ]
    unit_style = Style(INK, "_", "-", 15)
    previous, above = -math.inf, False
    octaves = math.log2(axes.get_xlim()[1] / axes.get_xlim()[0])
    for cell in panel.worst:
        unit, error = float(cell["unit_in_last_place"]), float(cell["max_abs_error"])
        axes.plot(
            [cell["seq_len"]],
            [unit],
            linestyle="none",
            marker="_",
            markersize=15,
            color=INK,
            mew=1.6,
            zorder=6,
        )
        place = math.log2(cell["seq_len"]) / octaves * width
        above = not above if place - previous < 0.4 else True
        previous = place
        axes.annotate(
            f"row {int(cell['error_row'])}",
            (cell["seq_len"], max(error, unit) if above else min(error, unit)),
            xytext=(0, 6 if above else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            size=SMALL,
            zorder=7,
        )
    if panel.worst:
        last = panel.worst[-1]
        labels.append(
            Label(
                last["seq_len"],
                float(last["unit_in_last_place"]),
                ["1 unit in the", "last place"],
                unit_style,
            )
        )
    else:
        axes.text(0.5, 0.5, "no error above 0 to draw", transform=axes.transAxes, ha="center", color=FAINT)
    _direct_labels(figure, axes, labels, width)


def _error_notes(grid: pd.DataFrame) -> list[str]:
    lines = [
        "row: the query row in which the largest error at that length lies. Black bar: one unit in the last"
        " place of the reference's value there.",
        "Strip: 0 – equal to the reference in every value; × – no right output, with its status and reason.",
    ]
    if "environment" in grid and len(grid):
        lines.append(one_line(grid["environment"].iloc[0]))
    return lines


def _plain(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if decimals else f"{value:.0f}"


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


_width_cache: dict[tuple[str, float], float] = {}


def _width(text: str, size: float) -> float:
    """Width in inches of a line of text in the figures' font."""
    if not text.strip():
        return 0.0
    key = (text, size)
    if key not in _width_cache:
        # A dollar sign would be taken for mathematics.
        path = TextPath((0, 0), text.replace("$", "S"), size=size)
        _width_cache[key] = float(path.get_extents().width) / 72
    return _width_cache[key]


def _svg(figure: Figure, title: str) -> str:
    stream = io.StringIO()
    # No date and no version: the same data gives the same bytes.
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return stream.getvalue()
