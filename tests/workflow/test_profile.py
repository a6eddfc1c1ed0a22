"""The profile's page: made for real on the CPU, and its rules on the numbers of a run on an H200."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from harness.ncu import counter_values, kernel_cells, read_csv
from harness.record import ERROR, OK, UNSUPPORTED, Record, write_record
from tests.workflow.checkout import Checkout, small_config
from workflow.config import load_config
from workflow.figures import COLOURS
from workflow.limits import (
    ALLOCATED,
    COMPUTE,
    COUNTED,
    LATENCY,
    LAUNCH,
    MEMORY_BOUND,
    NEEDED,
    NO_TENSOR,
    POWER,
    SPILLING,
    UNDECIDED,
    Evidence,
    _bytes_moved,
    _evidence,
    bytes_text,
    evidence,
    limits,
    with_counted_near,
    words,
)
from workflow.plan import Plan
from workflow.profile_page import (
    by_implementation,
    counter_sections,
    differences,
    fault_lines,
    fewer_and_slower,
    in_short,
    limits_page,
    limits_tables,
    profile_page,
    wins,
)
from workflow.profiling import counter_job, counter_jobs
from workflow.roofline_figure import roofline_figure

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "results" / "h200" / "default" / "benchmark.csv"
HAND_MADE = ROOT / "tests" / "data" / "hand_made" / "ncu_raw.csv"
RECORDED = ROOT / "tests" / "data" / "h200" / "ncu"  # real logs of ncu, one for each call
KERNELS = ("gemm", r"softmax\_kernel")  # of the table that was made by hand
ENVIRONMENT = {
    "gpu": None, "cpu": "a CPU", "cpu_threads_torch": 2, "torch": "2", "triton": "3", "python": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    checkout = Checkout.make(tmp_path_factory.mktemp("profile"))
    config = small_config(naive="naive", sdpa="sdpa", triton="triton_flash")
    config["static_profile"] = {"targets": ["sm_80"], "candidates": 1}
    checkout.configure(config)
    before = checkout.snakemake("profile")
    page = (checkout.folder / "report" / "profile.md").read_text()
    measured = checkout.snakemake("timing", "measure_roofline")
    assert measured.returncode == 0, measured.stdout
    return checkout, before, page


class TestARealProfile:
    def test_without_a_gpu_and_before_any_measurement_the_static_part_stands_alone_and_says_why(
        self, profiled
    ):
        _, before, page = profiled
        assert before.returncode == 0, before.stdout
        assert "No latency was measured here yet" in page
        assert "No counters: there is no GPU here" in page
        assert "## Compiled: sweep tiny" in page
        assert "- `sm_80`: tensor cores through mma" in before.stdout

    def test_what_was_timed_in_the_meantime_is_told_and_nothing_is_timed_for_it(self, profiled):
        checkout, _, _ = profiled
        assert set(checkout.planned("profile")) == {"render_profile", "profile"}
        result = checkout.snakemake("profile")
        assert result.returncode == 0, result.stdout
        page = (checkout.folder / "report" / "profile.md").read_text()
        assert "## What limits it" in page
        assert "Measured on" in page
        naive, sdpa = (
            [line for line in page.splitlines() if f"| {name} " in line] for name in ("naive", "sdpa")
        )
        assert naive
        assert sdpa
        # The interpreter's times mean nothing: they limit nothing.
        assert not [line for line in page.splitlines() if line.startswith("| tiny") and "| triton " in line]
        ElementTree.parse(checkout.folder / "report" / "figures" / "tiny_roofline.svg")
        assert "naive" in (checkout.folder / "report" / "tables" / "limits.html").read_text()
        assert set(checkout.planned("profile")) == {"profile"}

    def test_it_is_no_part_of_the_run(self, profiled):
        checkout, _, _ = profiled
        assert not {"render_profile", "read_counters", "profile_statically"} & set(checkout.planned("all"))


@pytest.fixture(scope="module")
def published():
    """The published run's rows; the machine's rates are those that were measured on such a GPU."""
    table = pd.read_csv(PUBLISHED)
    rows = []
    for row in table[table["twin_of"].isna()].to_dict("records"):
        memory = Record(
            phase="memory",
            spec={},
            status=OK,
            values={name: row[name] for name in ("extra_bytes", "workspace_bytes")},
        )
        moved, source = _bytes_moved(int(row["working_set_bytes"]), memory, {}, int(row["cache_bytes"]))
        rows.append(
            Evidence(
                row["sweep"],
                row["seq_len"],
                row["implementation"],
                latency_ms=row["latency_ms"],
                flop_count=int(row["teraflops_per_second"] * row["latency_ms"] * 1e9),
                minimal_bytes=int(row["working_set_bytes"]),
                bytes_moved=int(moved),
                bytes_from=source,
                matrix_rate=790e12,
                bandwidth=4.31e12,
                marks=() if pd.isna(row["marks"]) else tuple(row["marks"].split()),
                host_time_us=row["host_time_us"],
                throttle_reasons="" if pd.isna(row["throttle_reasons"]) else row["throttle_reasons"],
                power_w=row["power_w_max"],
            )
        )
    return {(row.sweep, row.seq_len, row.implementation): row for row in rows}


def test_each_row_of_a_published_run_has_the_words_that_its_numbers_deserve(published):
    assert words(published["article", 512, "sdpa"]) == LAUNCH
    assert words(published["article", 8192, "naive"]) == MEMORY_BOUND
    assert words(published["article", 8192, "sdpa"]) == COMPUTE
    assert words(published["llm", 16384, "triton"]) == f"{COMPUTE}, {POWER}"
    assert "launch takes the host" in limits(published["article", 512, "sdpa"])[0].sentence
    assert "19.5 GiB" in limits(published["article", 8192, "naive"])[0].sentence
    assert "up to 678 W" in limits(published["llm", 16384, "triton"])[1].sentence


def test_who_wins_is_told_with_what_the_others_pay_for(published):
    rows = list(published.values())
    first, others = wins(rows)[:2]
    assert first == (
        "Sweep article, seq_len 8192: **sdpa** wins with 484 TFLOP/s, 61 % of the measured matrix rate."
    )
    assert (
        "- **naive** takes 11.3 times as long: it moves at least 312 times the bytes that the problem needs,"
        " which alone take 4.86 of its 6.4 ms at the measured bandwidth." in others
    )
    # Neither was counted: nothing is said of whose bytes are more.
    assert "- **triton** takes 1.04 times as long: it reaches 464 TFLOP/s" in others
    assert "only counters of both would show" in others
    assert "moving as much" not in others
    (line,) = fewer_and_slower(rows)
    assert line.startswith("Nothing here is slower than another that is known to move far more bytes.")
    assert "the static profile below says" not in line  # there is none


def test_a_kernel_that_moves_fewer_bytes_and_loses_is_told_with_its_limits(published):
    naive = published["article", 8192, "naive"]
    slow = replace(published["article", 8192, "triton"], latency_ms=9.9, static=scalar())
    (line,) = fewer_and_slower([naive, slow])
    assert "**triton** is slower than naive, which moves at least 312 times the bytes" in line
    assert "was not counted" in line
    assert "no tensor-core instruction" in line
    assert "its loops have 1627 loads and 1012 stores of spilled registers" in line
    (line,) = fewer_and_slower([naive, replace(slow, bytes_from=COUNTED)])
    assert "**triton** moves fewer bytes than naive and is slower" in line


def scalar():
    return {
        "target": "sm_75", "verdicts": "no tensor cores; spills", "loop_local_load": 1627,
        "loop_local_store": 1012,
    }  # fmt: skip


def test_where_neither_rate_is_used_instructions_wait_and_the_counters_say_for_what(published):
    row = replace(published["article", 4096, "triton"], latency_ms=2.0, bytes_from=COUNTED)
    assert words(row) == LATENCY
    kernels = kernel_cells(read_csv(HAND_MADE.read_text()))
    (limit,) = limits(replace(row, kernels=kernels))
    assert "in gemm 2.5 warps wait for data from global or local memory for each one" in limit.sentence


def counted(row):
    """A row with the counters that ncu read on an H200 over the same call."""
    log = RECORDED / f"{row.sweep}_{row.implementation}_{row.seq_len}.log.gz"
    kernels = read_csv(gzip.decompress(log.read_bytes()).decode())
    values = counter_values(kernels)
    moved, source = _bytes_moved(row.minimal_bytes, Record(phase="memory", spec={}, status=ERROR), values, 0)
    return replace(row, counters=values, kernels=kernel_cells(kernels), bytes_moved=moved, bytes_from=source)


def least(row):
    """A row of which no more is known than what its problem needs."""
    return replace(row, bytes_moved=row.minimal_bytes, bytes_from=NEEDED)


def test_a_lower_bound_on_bytes_shows_no_idle_memory_and_counters_at_another_length_are_named_as_such(
    published,
):
    """Naive attention moves 158 times the least: by the least alone it would pass for latency-bound."""
    there, here = counted(published["article", 4096, "naive"]), least(published["article", 8192, "naive"])
    assert words(here) == UNDECIDED
    assert "the bytes that moved were not counted here" in limits(here)[0].sentence
    assert words(there) == MEMORY_BOUND
    near = with_counted_near([there, here, published["article", 8192, "sdpa"]])
    assert [row.counted_near and row.counted_near.seq_len for row in near] == [None, 4096, None]
    assert "at seq_len 4096, where they were, it is memory-bound" in limits(near[1])[0].sentence
    text = "\n".join(by_implementation(near))
    assert "By ncu, at seq_len 4096: DRAM moves 4.94 GiB, 158 times inputs and output" in text
    # More than half of the bandwidth by the least alone is more than half all the same.
    assert words(replace(here, latency_ms=0.02, matrix_rate=1e20)) == MEMORY_BOUND


def test_why_a_kernel_is_slower_is_told_from_the_counters_of_both(published):
    fast, slow = (counted(published["llm", 4096, name]) for name in ("sdpa", "triton"))
    text = "; ".join(differences(slow, fast))
    assert text.startswith("its tensor pipe is busy 52.7 % of the time, and that of sdpa 68.5 %")
    assert "it spills registers (it has 128 registers a thread, sdpa 168): 548 MiB are loaded" in text
    assert "2.3 wait for the other warps of the block at a barrier (1.6 in sdpa)" in text
    assert "1.5 wait for data from global or local memory (0.65 in sdpa)" in text
    assert "it is not short of warps: 25 % of those that fit are there, 14 % in sdpa" in text
    # What its bytes explain is not explained by warps.
    naive = counted(published["llm", 4096, "naive"])
    assert [text.split(" ")[1] for text in differences(naive, fast)] == ["launches", "moves"]
    assert "139 times the bytes of sdpa" in differences(naive, fast)[1]


def test_where_the_longest_length_was_not_counted_the_counters_of_another_are_named_as_such(published):
    names = ("sdpa", "triton")
    rows = [counted(published["llm", 4096, name]) for name in names]
    rows += [least(published["llm", 16384, name]) for name in names]
    first, others = wins(rows)
    assert first.startswith("Sweep llm, seq_len 16384: **sdpa** wins")
    assert "At seq_len 4096, where ncu counted both and it takes 1." in others
    assert "548 MiB are loaded from local memory" in others
    # Where the other was the slower one, its counters explain nothing.
    upset = [replace(rows[0], latency_ms=9.0), *rows[1:]]
    assert "only counters of both would show" in wins(upset)[1]


def decode(name, latency_ms, *marks):
    """A decode step of 256 MiB of K and V, on a GPU that reads 4.4 TB/s."""
    size = 2**28
    return Evidence(
        *("decode", 65536, name),
        latency_ms=latency_ms,
        flop_count=4 * size,
        minimal_bytes=size + 16384,
        bytes_moved=size + 16384,
        bytes_from=NEEDED,
        matrix_rate=790e12,
        bandwidth=4.4e12,
        marks=marks,
        workload="decode",
        key_value_bytes_per_second=size / latency_ms * 1e3,
        share_of_read_bandwidth=size / latency_ms * 1e3 / 4.4e12,
    )


def test_a_floor_is_no_contender_and_the_winner_is_held_against_it():
    rows = [decode("fast", 0.07), decode("slow", 0.08), decode("read", 0.065, "not_attention")]
    first, others = wins(rows)
    assert first.startswith("Sweep decode, seq_len 65536: **fast** wins with 3.83 TB/s")
    assert "It takes 1.08 times as long as the floor read" in first
    assert "read" not in others.replace("read bandwidth", "")
    assert wins([rows[0], rows[2]]) == ["No two implementations have a number at the same length."]
    assert "read (sweep decode, a floor): memory-bound at 65536." in in_short(rows, [], "cuda")
    assert NO_TENSOR not in words(replace(rows[2], counters={"tensor_pipe_percent": 0.0}))


def test_a_decode_step_is_told_in_bytes_of_keys_and_values_a_second():
    row = decode("fast", 0.07)
    (limit,) = limits(row)
    assert "K and V are read with 3.83 TB/s, 87 % of the measured read bandwidth" in limit.sentence
    assert "TFLOP/s" not in limit.sentence
    title, table = limits_tables([row])
    assert "K and V (TB/s)" in table
    assert "of the read bandwidth" in table
    assert "TFLOP/s" not in title + table
    assert "3.83" in limits_page([row])


def test_of_two_that_take_as_long_nothing_is_explained():
    assert wins([decode("one", 0.07), decode("other", 0.0701)])[1] == (
        "- **other** takes as long, to three figures."
    )


def test_two_that_both_live_on_memory_are_compared_by_bytes_and_bandwidth():
    fast, slow = decode("fast", 0.07), decode("slow", 0.08)
    fast, slow = (
        replace(row, bytes_from=COUNTED, counters={"kernel_count": 1, "tensor_pipe_percent": 3.0})
        for row in (fast, slow)
    )
    assert differences(replace(slow, bytes_moved=300 * 2**20), fast) == [
        "it moves 1.17 times the bytes of fast, at 89 % of the measured bandwidth, and fast at 87 %"
    ]


def test_counters_of_other_launch_options_than_were_timed_are_not_the_rows():
    values = {"latency_ms": 1.0, "flop_count": 1, "working_set_bytes": 10, "options": "{}"}
    timing = Record(phase="timing", spec={}, status=OK, values=values)
    memory = Record(phase="memory", spec={}, status=ERROR, reason="none")
    found = {"dram_read_bytes": 30.0, "dram_write_bytes": 3.0}
    for options, source in (("{}", COUNTED), ('{"tile_q":64}', NEEDED)):
        profile = Record(phase="profile", spec={}, status=OK, values={"options": options, **found})
        row = _evidence(
            *(("tiny", 64, "triton"), timing, memory, profile),
            matrix_rate=1e12,
            bandwidth=1e12,
            static=None,
            workload="attention",
        )
        assert row.bytes_from == source
        assert bool(row.counters) == (source == COUNTED)


def test_a_short_product_is_not_taken_for_none(published):
    """A decode step keeps the tensor pipe busy for as little as kernels do that have no product."""
    row = replace(published["article", 4096, "triton"], counters={"tensor_pipe_percent": 0.7})
    assert NO_TENSOR not in words(row)
    assert NO_TENSOR in words(replace(row, static=scalar()))
    assert NO_TENSOR in words(replace(row, counters={"tensor_pipe_percent": 0.0}))


def test_bytes_are_written_with_three_figures():
    assert [bytes_text(count) for count in (12, 1000 * 2**20, 999 * 2**20, 2**30, 1.5 * 2**30)] == [
        "12 bytes", "1000 MiB", "999 MiB", "1 GiB", "1.5 GiB",
    ]  # fmt: skip


def test_counters_overrule_what_the_machine_code_only_suggests(published):
    row = replace(published["article", 4096, "triton"], static=scalar())
    assert {NO_TENSOR, SPILLING} <= set(words(row).split(", "))
    counters = {
        "tensor_pipe_percent": 55.0, "local_load_bytes": 0.0, "local_store_bytes": 0.0, "l2_bytes": 1e9,
    }  # fmt: skip
    assert words(replace(row, counters=counters)) == COMPUTE
    idle = counters | {"tensor_pipe_percent": 0.0, "local_load_bytes": 5e7}
    assert words(replace(row, counters=idle)) == f"{COMPUTE}, {NO_TENSOR}, {SPILLING}"


def test_bytes_are_counted_ones_where_there_are_any_and_else_the_least_that_is_known():
    memory = Record(phase="memory", spec={}, status=OK, values={"extra_bytes": 5000, "workspace_bytes": 1000})
    counted_bytes = {"dram_read_bytes": 7.0, "dram_write_bytes": 2.0}
    assert _bytes_moved(1000, memory, counted_bytes, 0) == (9, COUNTED)
    assert _bytes_moved(1000, memory, {}, 0) == (1000 + 2 * 4000, ALLOCATED)
    assert _bytes_moved(1000, replace(memory, values={"extra_bytes": 1536}), {}, 0)[1] == ALLOCATED
    assert _bytes_moved(1000, replace(memory, values={"extra_bytes": 512}), {}, 0) == (1000, NEEDED)
    assert _bytes_moved(1000, replace(memory, status=ERROR, values={}), {}, 0) == (1000, NEEDED)
    # What fits into the cache may never reach memory.
    assert _bytes_moved(1000, memory, {}, 500) == (1000 + 2 * 2000, ALLOCATED)
    assert _bytes_moved(1000, memory, {}, 800) == (1000, NEEDED)


def test_the_bound_by_what_is_allocated_is_below_what_was_counted(published):
    """On an H200, where both are known."""
    for sweep in ("article", "llm"):
        row = published[sweep, 4096, "naive"]
        assert row.bytes_from == ALLOCATED
        assert row.minimal_bytes < row.bytes_moved < counted(row).bytes_moved
    # 32 MiB of scores pass from kernel to kernel in 60 MiB of cache: nothing is known of memory.
    assert published["article", 1024, "naive"].bytes_from == NEEDED


def bare(name="one", *, matrix_share=0.1, memory_share=0.1, latency_ms=1.0, **others):
    """A counted row of 1 ms that takes these shares of a machine of 1 TFLOP/s and 1 TB/s."""
    row = Evidence(
        *("tiny", 128, name),
        latency_ms=1.0,
        flop_count=int(matrix_share * 1e9),
        minimal_bytes=10**6,
        bytes_moved=int(memory_share * 1e9),
        bytes_from=COUNTED,
        matrix_rate=1e12,
        bandwidth=1e12,
    )
    return replace(row, latency_ms=latency_ms, **others)


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ({"matrix_share": 0.48}, LATENCY),
        ({"matrix_share": 0.52}, COMPUTE),
        ({"memory_share": 0.48}, LATENCY),
        ({"memory_share": 0.52}, MEMORY_BOUND),
        ({"matrix_share": 0.6, "memory_share": 0.7}, MEMORY_BOUND),
        ({"matrix_share": 0.7, "memory_share": 0.6}, COMPUTE),
    ],
)
def test_a_rate_limits_where_more_than_half_of_it_is_used_and_of_two_the_greater(shares, word):
    assert words(bare(**shares)) == word


def test_two_are_compared_by_bandwidth_only_where_one_of_them_uses_more_than_half_of_it():
    busy = {"counters": {"tensor_pipe_percent": 30.0}}
    fast = bare("fast", memory_share=0.3, **busy)
    (text,) = differences(bare(memory_share=0.44, **busy), fast)
    assert text == "its tensor pipe is busy 30 % of the time, and that of fast 30 %"
    (text,) = differences(bare(memory_share=0.52, **busy), replace(fast, bytes_moved=4 * 10**8))
    assert text.endswith("at 52 % of the measured bandwidth, and fast at 40 %")


def test_less_than_one_and_a_half_times_the_bytes_explains_no_difference():
    fast = bare("fast", bytes_moved=10**8)
    assert differences(bare(bytes_moved=145 * 10**6), fast) == []
    assert differences(bare(bytes_moved=155 * 10**6), fast) == [
        "it moves 1.55 times the bytes of fast, which alone take 0.155 of its 1 ms at the measured bandwidth"
    ]
    cached = {count: bare(counters={"l2_bytes": count}) for count in (1e9, 1.45e9, 1.55e9)}
    assert differences(cached[1.45e9], cached[1e9]) == []
    assert differences(cached[1.55e9], cached[1e9]) == ["L2 moves 1.55 times the bytes"]


def test_less_than_one_and_a_half_times_the_least_is_not_what_a_slower_one_pays_for():
    fast = bare("fast", latency_ms=0.5, bytes_from=NEEDED)
    needed = {"bytes_from": ALLOCATED, "minimal_bytes": 10**8}
    assert "it moves" not in wins([fast, bare(**needed, bytes_moved=145 * 10**6)])[1]
    assert (
        "it moves at least 1.55 times the bytes" in wins([fast, bare(**needed, bytes_moved=155 * 10**6)])[1]
    )


def test_warps_are_short_where_the_other_has_more_than_one_and_a_half_times_as_many():
    kernels = [{"name": "kernel", "share": 1.0, "stalls": {}}]
    slow, *fast = (bare(kernels=kernels, counters={"occupancy_percent": part}) for part in (20.0, 29.0, 31.0))
    assert [differences(slow, other)[0].split(":")[0] for other in fast] == [
        "it is not short of warps", "it has fewer warps",
    ]  # fmt: skip


def test_a_reason_to_wait_is_told_from_a_quarter_of_a_warp_more_on():
    def waits(**stalls):
        return bare("fast", kernels=[{"name": "kernel", "share": 1.0, "stalls": stalls}])

    assert differences(waits(barrier=1.22), waits(barrier=1.0)) == []
    assert differences(waits(barrier=1.28, wait=9.0), waits(barrier=1.0, wait=8.9)) == [
        "for each warp that issues, 1.3 wait for the other warps of the block at a barrier (1 in fast)"
    ]


def test_only_a_contender_that_moves_far_fewer_bytes_than_another_is_told_for_being_slower():
    fast = bare("fast", bytes_moved=155 * 10**6, latency_ms=0.5)
    slow = bare("slow", bytes_moved=10**8)
    (line,) = fewer_and_slower([fast, slow])
    assert "**slow** moves fewer bytes than fast and is slower" in line
    assert fewer_and_slower([replace(fast, bytes_moved=145 * 10**6), slow]) == []
    floor = {"marks": ("not_attention",)}
    assert fewer_and_slower([fast, replace(slow, **floor)]) == []
    assert fewer_and_slower([replace(fast, **floor), slow]) == []


def gpu_plan():
    config = small_config(naive="naive", sdpa="sdpa", triton="triton_flash", twin="sdpa")
    config["sweeps"]["tiny"]["seq_lens"]["cuda"] = [64, 128]
    config["profile"] = {"seq_lens": [128]}
    config["device"] = "cuda"
    return Plan(load_config(config, ROOT / "kernels"), "cuda", "h200", ROOT)


ROOFLINE = {
    **{"read_bytes_per_second": 4.0e12, "copy_bytes_per_second": 4.3e12, "flush_proven": True},
    "matrix_float16_teraflops_per_second": 700.0,
    "matrix_bfloat16_teraflops_per_second": 800.0,
    "matrix_float32_teraflops_per_second": 900.0,
    "matrix_teraflops_per_second": 900.0,
}


@pytest.mark.parametrize(
    ("device", "dtype", "rate"),
    [("cuda", "fp16", 700e12), ("cuda", "bf16", 800e12), ("cpu", "fp16", 900e12), ("cpu", "bf16", 900e12)],
)
def test_a_row_is_held_against_the_matrix_rate_of_its_own_dtype_and_on_a_cpu_against_the_best(
    tmp_path, device, dtype, rate
):
    config = gpu_plan().config
    config["sweeps"]["tiny"]["dtype"] = dtype
    config["sweeps"]["tiny"]["seq_lens"]["cpu"] = [128]
    plan = Plan(config, device, "here", ROOT)
    timed = {"latency_ms": 1.0, "flop_count": 10**9, "working_set_bytes": 10**6, "options": "{}"}
    timing = plan.sweep_job("timing", "tiny", "naive", 128)
    for job, values in ((plan.roofline_job(), ROOFLINE), (timing, timed)):
        write_record(Record(job.phase, job.spec, OK, values=values), tmp_path / job.path)
    (row,) = evidence(plan, tmp_path, [], None)
    assert row.matrix_rate == rate
    assert row.bandwidth == 4.3e12


def test_on_a_gpu_each_implementation_is_profiled_at_the_lengths_that_were_chosen():
    jobs = counter_jobs(gpu_plan())
    assert [(job.implementation, job.seq_len) for job in jobs] == [
        ("naive", 128),
        ("sdpa", 128),
        ("triton", 128),
    ]
    assert counter_jobs(Plan(gpu_plan().config, "cpu", "here", ROOT)) == []


def counters(**statuses):
    """Profile records; `ok` ones hold the kernels of the table that was made by hand."""
    plan = gpu_plan()
    kernels = read_csv(HAND_MADE.read_text())
    found = []
    for name, status in statuses.items():
        job = counter_job(plan, "tiny", name, 128)
        record = Record(phase="profile", spec=job.spec, status=status, reason=f"why | {name}")
        if status == OK:
            record = replace(record, reason=None, values=counter_values(kernels), cells=kernel_cells(kernels))
        found.append((job, record))
    return found


def test_every_kernel_of_a_call_is_named_and_what_could_not_be_counted_says_why():
    text = "\n".join(counter_sections(counters(naive=OK, sdpa=UNSUPPORTED), "cuda"))
    assert "gemm" in text
    assert "softmax\\_kernel" in text
    assert "### Sweep tiny, seq_len 128" in text
    assert "3.81 MiB / 1.43 MiB" in text  # DRAM read and written, the two kernels together
    [(job, record)] = counters(naive=OK)
    [through_l2] = re.findall(r"L2, times the least *\| *([\d.]+)", text)
    sizes = job.spec["problem"]
    needed = 2 * 2 * 2 * 128 * 16 * sizes["batch"] * sizes["heads"]  # Q, K, V and O, of two bytes each
    assert float(through_l2) == pytest.approx(record.values["l2_bytes"] / needed, rel=0.01)
    assert "sdpa at seq_len 128 (sweep tiny): unsupported: why \\| sdpa" in text
    assert "long\\_scoreboard 6.5" in text
    assert "long\\_scoreboard: waits for data from global or local memory." in text


def shown_cells(text, first):
    """What a Markdown table has, behind its first cell, in the line that begins with this one."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    (cells,) = [cells for cells in lines if cells[0] == first]
    return cells[1:]


def test_each_row_of_the_table_of_calls_has_its_own_quantity():
    """16 KiB each of Q, K, V and output; the percentages of two kernels, 3 to 1 by their times."""
    text = "\n".join(counter_sections(counters(naive=OK), "cuda"))
    rows = {
        "kernels": "2",
        "DRAM read / written": "3.81 MiB / 1.43 MiB",
        "times the least": f"{5.5e6 / (4 * 2 * 128 * 16 * 2):.3g}",
        "L2 bytes": "9.54 MiB",
        "local memory loaded / stored": "640 bytes / 320 bytes",
        "L2 hits": f"{(3 * 50 + 25) / 4:.3g} %",
        "tensor pipe busy": f"{3 * 60.5 / 4:.3g} %",
        "FP32 pipe busy": f"{(3 * 10 + 30) / 4:.3g} %",
        "issuing": f"{(3 * 55 + 15) / 4:.3g} %",
        "occupancy": f"{(3 * 25 + 75) / 4:.3g} %",
        "registers a thread": "128",
    }
    assert {name: shown_cells(text, name) for name in rows} == {name: [cell] for name, cell in rows.items()}


def test_each_column_of_the_table_of_kernels_has_its_own_quantity():
    text = "\n".join(counter_sections(counters(naive=OK), "cuda"))
    columns = shown_cells(text, "kernel")
    gemm, softmax = (dict(zip(columns, shown_cells(text, name), strict=True)) for name in KERNELS)
    assert gemm == {
        "of the time": "75 %",
        "DRAM read / written": "977 KiB / 488 KiB",
        "L2 hits": "50 %",
        "tensor pipe busy": "60.5 %",
        "occupancy": "25 %",
        "registers": "128",
        "waits": "long\\_scoreboard 2.5, barrier 0.25",
    }
    assert softmax["DRAM read / written"] == "2.86 MiB / 977 KiB"
    assert (softmax["tensor pipe busy"], softmax["occupancy"]) == ("0 %", "75 %")


def test_the_kernel_that_a_call_of_sdpa_runs_tells_which_backend_it_took():
    log = gzip.decompress((RECORDED / "article_sdpa_4096.log.gz").read_bytes()).decode()
    kernels = read_csv(log)
    [(job, record)] = counters(sdpa=OK)
    record = replace(record, values=counter_values(kernels), cells=kernel_cells(kernels))
    text = "\n".join(counter_sections([(job, record)], "cuda"))
    assert r"sdpa is one kernel, cudnn\_generated\_fort\_native\_sdpa\_sm90\_flash\_fprop" in text


def test_where_nothing_can_be_counted_the_page_says_why_once():
    refused = counters(naive=UNSUPPORTED, sdpa=UNSUPPORTED)
    assert in_short([], refused, "cuda")[-1].startswith("No counters: why \\| naive; why \\| sdpa.")
    page = profile_page([], refused, [], ENVIRONMENT, "cuda", {})
    assert "No latency was measured here yet" in page
    assert fault_lines(refused) == []
    assert fault_lines(counters(naive=ERROR)) == ["error: naive at seq_len 128 (sweep tiny): why | naive"]


def test_no_duration_of_ncu_stands_on_the_page(published):
    """Its kernels took 3,000 and 1,000 ns: shares of them may be shown, times may not."""
    page = profile_page([], counters(naive=OK), [], ENVIRONMENT, "cuda", {})
    assert "75 %" in page
    for text in ("3,000", "3000", "0.003", "1,000 ns", "3 us"):
        assert text not in page


def test_the_roofline_has_every_implementation_both_roofs_and_the_same_bytes_each_time(published):
    rows = [row for row in published.values() if row.sweep == "article"]
    svg = roofline_figure("article", rows)
    ElementTree.fromstring(svg)
    for text in ("naive", "sdpa", "triton", "matrix rate 790 TFLOP/s", "bandwidth 4.31 TB/s", "8192"):
        assert text in svg
    assert svg == roofline_figure("article", rows)
    assert "no number to draw" in roofline_figure("article", [])


def test_the_roofline_joins_no_bound_to_a_count_and_says_what_is_hollow(published):
    bounds = [least(published["article", seq_len, "naive"]) for seq_len in (2048, 4096, 8192)]
    svg = roofline_figure("article", bounds)
    assert "Hollow: its bytes are a lower bound" in svg
    assert joined_points(svg) == 3
    mixed = [bounds[0], counted(published["article", 4096, "naive"]), bounds[2]]
    assert joined_points(roofline_figure("article", mixed)) == 2
    assert "Hollow" not in roofline_figure("article", [mixed[1]])


def joined_points(svg):
    """How many points the faint lines of a roofline join."""
    lines = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity: 0\.6', svg)
    return sum(line.count("L") + 1 for line in lines if "L" in line)


def test_a_roofline_far_below_the_matrix_rate_leaves_it_out_and_says_so():
    rows = [decode("fast", 0.07), decode("read", 0.065, "not_attention")]
    svg = roofline_figure("decode", rows, ["naive", "fast", "read"])
    assert "is the roof from 180 FLOP / byte on, to the right of this figure" in svg
    assert "matrix rate 790" not in svg
    assert "read (floor)" in svg
    # An implementation looks as it does in the run's other figures, whichever sweep it is in.
    assert COLOURS[1].lower() in svg
    assert COLOURS[2].lower() in svg
    assert COLOURS[1].lower() in roofline_figure("decode", rows[:1], ["naive", "fast", "read"])
    assert COLOURS[1].lower() not in roofline_figure("decode", rows[:1])


def test_the_html_table_has_every_row_and_its_reasons(published):
    table = limits_page(list(published.values()))
    assert table.count("<tr>") == len(published) + 1
    assert "power cap, and was seen to draw up to 678 W" in table
    assert "No latency was measured" in limits_page([])
