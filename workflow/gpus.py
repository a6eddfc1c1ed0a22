"""Do the GPUs of a run agree? What each measured, and how far apart they are where they measured the same."""

from __future__ import annotations

import math
from statistics import fmean

import pandas as pd

from workflow.comparisons import GPU
from workflow.tables import markdown, table_text
from workflow.verdicts import comparison_row


def gpu_section(benchmark: pd.DataFrame, comparison: pd.DataFrame) -> list[str]:
    """The report's part on several GPUs, from the two CSV files; empty where the rows come from one."""
    if "latency_gpu" not in benchmark or "against_gpu" not in comparison:
        return []  # files from before there was such a column
    same = comparison[comparison["kind"] == GPU]
    uuids = list(dict.fromkeys([*benchmark["latency_gpu"].dropna(), *same["against_gpu"].dropna()]))
    if len(uuids) < 2:
        return []
    rows = [_spread_row(uuid, benchmark[benchmark["latency_gpu"] == uuid], same) for uuid in uuids]
    return ["## Do the GPUs agree?", markdown(rows), *_same_on_both(same)]


def _spread_row(uuid: str, rows: pd.DataFrame, same: pd.DataFrame) -> dict[str, str]:
    """One GPU: what it measured, under which clock, and its latencies against those of the others."""
    ratios = [*same.loc[same["gpu"] == uuid, "ratio"], *(1 / same.loc[same["against_gpu"] == uuid, "ratio"])]
    logarithms = [math.log(ratio) for ratio in ratios if ratio > 0]
    return {
        "GPU": table_text(uuid),
        "rows": str(len(rows)),
        "SM clock (MHz)": _median(rows["metered_sm_clock_mhz"]),
        "hottest (°C)": _largest(rows["temperature_c_max"]),
        "most power (W)": _largest(rows["power_w_max"]),
        "measured elsewhere too": str(len(logarithms)),
        "latency against the others": f"{(math.exp(fmean(logarithms)) - 1) * 100:+.2g} %"
        if logarithms
        else "",
    }


def _same_on_both(same: pd.DataFrame) -> list[str]:
    measured = same[same["ratio"].notna()]
    if measured.empty:
        return [
            "Nothing was measured on more than one of them, so this run cannot tell whether they agree. An"
            " A/A test whose two sides lie on two GPUs (`one_gpu_per_sweep: false`) tells."
        ]
    apart = int(((measured["ratio_low"] > 1) | (measured["ratio_high"] < 1)).sum())
    beyond = int(measured["verdict"].isin(["FASTER", "SLOWER"]).sum())
    largest = measured.loc[(measured["ratio"].map(math.log)).abs().idxmax()]
    line = (
        f"One thing on two GPUs, {len(measured)} comparisons: the 99 % interval excludes 1 in {apart} of"
        " them, and the difference is beyond what one GPU gives when it measures twice (A/A) in"
        f" {beyond}. The ratio furthest from 1 is {largest['ratio']:.3f}, of"
        f" {table_text(largest['implementation'])} at seq_len {largest['seq_len']}"
        f" (sweep {table_text(largest['sweep'])})."
    )
    table = [
        {
            "sweep": table_text(row["sweep"]),
            **{name: text for name, text in comparison_row(row).items() if name != "against"},
            "on": table_text(row["gpu"]),
            "against": table_text(row["against_gpu"]),
        }
        for row in measured.to_dict("records")
    ]
    return [line, markdown(table)]


def _median(values: pd.Series) -> str:
    present = values.dropna()
    return "" if present.empty else f"{present.median():.4g}"


def _largest(values: pd.Series) -> str:
    present = values.dropna()
    return "" if present.empty else f"{present.max():.4g}"
