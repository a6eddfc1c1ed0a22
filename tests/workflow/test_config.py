"""The configuration: what is wrong with it is said in full, one line a fault."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from workflow.config import ConfigError, available_kernels, load_config, load_schema, resolve
from workflow.plan import CORRECTNESS, TIMING, Plan

ROOT = Path(__file__).resolve().parents[2]
RENDER = ROOT / "workflow" / "scripts" / "render_config_readme.py"

SWEEP = {
    "batch": 1,
    "heads": 16,
    "head_dim": 64,
    "causal": False,
    "dtype": "fp16",
    "seq_lens": {"cuda": [512, 1024], "cpu": [64]},
}
MINIMAL = {"implementations": {"naive": {"kernel": "naive"}}, "sweeps": {"article": SWEEP}}

KERNELS = {
    "naive": "def attention(q, k, v, *, causal, scale=None): ...",
    "sdpa": """
        from typing import Literal
        Backend = Literal["default", "cudnn"]
        def attention(q, k, v, *, causal, scale=None, backend: Backend = "default"): ...
    """,
    "triton_flash": """
        import typing
        def attention(
            q, k, v, *, causal: bool, scale: float | None = None,
            stages: typing.Literal[1, 2] | None = None, block_m: int = 64, order: "bool" = True,
            eps: float = 0.0, free=None, **others,
        ): ...
    """,
    "demanding": "def attention(q, k, v, *, causal, scale=None, tile: int): ...",
    "helpers": "def other(): ...",
    "broken": "def attention(:",
    "_private": "def attention(q, k, v, *, causal, scale=None): ...",
}
KERNEL_LIST = "demanding, naive, sdpa, triton_flash"

NAME = "a name of at most 40 lower-case letters, digits and underscores that begins with a letter"
ENVIRONMENT = "an environment's key (`workflow/scripts/show_environment_key.py` prints it), or null"
CLOCK = "an integer from 100 to 10000, or null"
COUNTS_OR_NONE = "a list, without duplicates, each an integer of at least 1"
BOOLEAN = "a boolean (YAML reads yes, no, on and off as booleans)"
NULL = "null (nothing is written below the key)"
NUMBER_AS_TEXT = "text (in quotes, or by --config, which makes text of what is in a list or a mapping)"
TOP_KEYS = (
    "device, environment, one_gpu_per_sweep, time_limit_s, implementations, baseline, goals, correctness,"
    " timing, tuning, sdpa_diagnostic, static_profile, profile, collect, sweeps"
)
TIMING_KEYS = (
    "processes, samples, samples_interpreted, second_timer_seq_lens, warm_up_min_s, warm_up_max_s,"
    " lock_sm_clock_mhz"
)
SWEEP_KEYS = (
    "workload, batch, tokens, heads, kv_heads, head_dim, causal, queries, lengths, page_size, dtype,"
    " seq_lens, measure, implementations"
)


@pytest.fixture
def kernels(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, source in KERNELS.items():
        lines = source.split("\n")
        indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else 0
        (folder / f"{name}.py").write_text("\n".join(line[indent:] if indent else line for line in lines))
    return folder


def changed(*changes):
    """The minimal config with values set, each given as (key, ..., value); `...` deletes a key."""
    config = copy.deepcopy(MINIMAL)
    for *keys, last, value in changes:
        place = config
        for key in keys:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return config


def implementation(**values):
    return changed(("implementations", "x", values))


def sweep(**values):
    return changed(*(("sweeps", "article", key, value) for key, value in values.items()))


BAD = {
    "device unknown": (
        changed(("device", "gpu")),
        ['device = "gpu": must be one of auto, cuda, cpu'],
    ),
    "device null": (
        changed(("device", None)),
        ["device = null: must be one of auto, cuda, cpu"],
    ),
    "environment that is no folder": (
        changed(("device", "cuda"), ("environment", "../elsewhere")),
        [f'environment = "../elsewhere": must be {ENVIRONMENT}'],
    ),
    "environment and a device to be found here": (
        changed(("environment", "nvidia-h200_driver580.65")),
        [
            'device = "auto": must be cuda or cpu where environment is given:'
            " another machine's is not looked up here"
        ],
    ),
    "time limit zero": (
        changed(("time_limit_s", 0)),
        ["time_limit_s = 0: must be above 0"],
    ),
    "time limit text": (
        changed(("time_limit_s", "10 min")),
        ['time_limit_s = "10 min": must be a number above 0, not text'],
    ),
    "time limit infinite": (
        changed(("time_limit_s", math.inf)),
        ["time_limit_s = Infinity: must be a number above 0, not infinity or not-a-number"],
    ),
    "time limit beyond all numbers": (
        changed(("time_limit_s", 10**309)),
        [f"time_limit_s = 1{'0' * 56}...: must be a number above 0, not a number"],
    ),
    "time limit not a number": (
        changed(("time_limit_s", math.nan)),
        ["time_limit_s = NaN: must be a number above 0, not infinity or not-a-number"],
    ),
    "top-level key misspelt": (
        changed(("sweep", {})),
        [f"sweep = {{}}: unknown key; must be one of {TOP_KEYS}; did you mean sweeps?"],
    ),
    "top-level key unheard of": (
        changed(("color", "red")),
        [
            f'color = "red": unknown key; must be one of {TOP_KEYS}',
        ],
    ),
    "empty file": (
        {},
        ["implementations: missing; must be a mapping", "sweeps: missing; must be a mapping"],
    ),
    "not a mapping": (
        ["naive"],
        ['the whole = ["naive"]: must be a mapping, not a list'],
    ),
    "implementations null": (
        changed(("implementations", None)),
        [f"implementations = null: must be a mapping, not {NULL}"],
    ),
    "implementations empty": (
        changed(("implementations", {})),
        ["implementations = {}: must not be empty"],
    ),
    "implementations a list": (
        changed(("implementations", ["naive"])),
        ['implementations = ["naive"]: must be a mapping, not a list'],
    ),
    "implementation null": (
        changed(("implementations", "x", None)),
        [f"implementations.x = null: must be a mapping, not {NULL}"],
    ),
    "implementation a word": (
        changed(("implementations", "x", "naive")),
        ['implementations.x = "naive": must be a mapping, not text'],
    ),
    "implementation's name in capitals": (
        changed(("implementations", "Naive", {"kernel": "naive"})),
        [f"implementations.Naive: must be {NAME}"],
    ),
    "implementation's name with a dash": (
        changed(("implementations", "a-b", {"kernel": "naive"})),
        [f'implementations["a-b"]: must be {NAME}'],
    ),
    "implementation's name with a line break": (
        changed(("implementations", "a\n", {"kernel": "naive"})),
        [f'implementations["a\\n"]: must be {NAME}'],
    ),
    "implementation's name too long": (
        changed(("implementations", "a" * 41, {"kernel": "naive"})),
        [f"implementations.{'a' * 41}: must be {NAME}"],
    ),
    "implementation's name a boolean": (
        changed(("implementations", True, {"kernel": "naive"})),
        [
            'implementations[true] = {"kernel": "naive"}: a key must be text, '
            f"not {BOOLEAN}; put it in quotes if it is meant"
        ],
    ),
    "sweep's name a number": (
        changed(("sweeps", 7, SWEEP)),
        [
            f"sweeps[7] = {json.dumps(SWEEP)[:57]}...: a key must be text, "
            "not a number; put it in quotes if it is meant"
        ],
    ),
    "kernel missing": (
        implementation(options={}),
        [f"implementations.x.kernel: missing; must be {NAME}"],
    ),
    "kernel a path": (
        implementation(kernel="../naive"),
        [f'implementations.x.kernel = "../naive": must be {NAME}'],
    ),
    "kernel misspelt": (
        implementation(kernel="triton_flesh"),
        [
            'implementations.x.kernel = "triton_flesh": there is no kernels/triton_flesh.py; '
            f"must be one of {KERNEL_LIST}; did you mean triton_flash?"
        ],
    ),
    "kernel unheard of": (
        implementation(kernel="q"),
        [f'implementations.x.kernel = "q": there is no kernels/q.py; must be one of {KERNEL_LIST}'],
    ),
    "kernel without attention": (
        implementation(kernel="helpers"),
        [
            'implementations.x.kernel = "helpers": kernels/helpers.py defines no function attention or '
            f"decode at top level; must be one of {KERNEL_LIST}"
        ],
    ),
    "kernel that does not parse": (
        implementation(kernel="broken"),
        [
            'implementations.x.kernel = "broken": kernels/broken.py is not readable as Python '
            f"(invalid syntax (broken.py, line 1)); must be one of {KERNEL_LIST}"
        ],
    ),
    "option misspelt": (
        implementation(kernel="sdpa", options={"bakend": "cudnn"}),
        ['implementations.x.options.bakend = "cudnn": unknown option; must be backend'],
    ),
    "option of a kernel without": (
        implementation(kernel="naive", options={"backend": "cudnn"}),
        ['implementations.x.options.backend = "cudnn": unknown option; kernel naive takes no options'],
    ),
    "option that the harness passes": (
        implementation(kernel="sdpa", options={"scale": 0.5}),
        ["implementations.x.options.scale = 0.5: unknown option; must be backend"],
    ),
    "option not among the literals": (
        implementation(kernel="sdpa", options={"backend": "flash3"}),
        ['implementations.x.options.backend = "flash3": must be one of default, cudnn'],
    ),
    "option true for the literal 1": (
        implementation(kernel="triton_flash", options={"stages": True}),
        ["implementations.x.options.stages = true: must be one of 1, 2, null"],
    ),
    "options of another type": (
        implementation(kernel="triton_flash", options={"block_m": "64", "order": 1, "eps": True}),
        [
            'implementations.x.options.block_m = "64": must be an integer',
            "implementations.x.options.order = 1: must be true or false",
            "implementations.x.options.eps = true: must be a number",
        ],
    ),
    "option swallowed by **others": (
        implementation(kernel="triton_flash", options={"zzz": 1}),
        [
            "implementations.x.options.zzz = 1: unknown option; "
            "must be one of stages, block_m, order, eps, free"
        ],
    ),
    "option a list": (
        implementation(kernel="triton_flash", options={"free": [1, 2]}),
        ["implementations.x.options.free = [1, 2]: must be text, a number, true, false or null, not a list"],
    ),
    "option without a default left out": (
        implementation(kernel="demanding"),
        ["implementations.x.options.tile: missing; kernel demanding has no default for it"],
    ),
    "options null": (
        implementation(kernel="sdpa", options=None),
        [f"implementations.x.options = null: must be a mapping, not {NULL}"],
    ),
    "grid empty": (
        changed(("correctness", {"seq_lens": {"cpu": []}, "dtypes": []})),
        [
            "correctness.seq_lens.cpu = []: must not be empty",
            "correctness.dtypes = []: must not be empty",
        ],
    ),
    "grid's lengths not by device": (
        changed(("correctness", "seq_lens", [128])),
        ["correctness.seq_lens = [128]: must be a mapping, not a list"],
    ),
    "grid's causal numbers": (
        changed(("correctness", "causal", [0, 1])),
        [
            "correctness.causal[0] = 0: must be true or false, not a number",
            "correctness.causal[1] = 1: must be true or false, not a number",
        ],
    ),
    "correctness null": (
        changed(("correctness", None)),
        [f"correctness = null: must be a mapping, not {NULL}"],
    ),
    "tolerance missing": (
        changed(("correctness", "tolerances", {"bf16": {"absolute": 0.01, "relative": 0.01}})),
        ["correctness.tolerances.fp16: missing; fp16 is used by correctness.dtypes, sweeps.article.dtype"],
    ),
    "tolerance half": (
        changed(
            ("correctness", "tolerances", "fp16", {"absolute": 0.01}), ("correctness", "dtypes", ["fp16"])
        ),
        ["correctness.tolerances.fp16.relative: missing; must be a number from 0 to 0.1"],
    ),
    "tolerance that allows all": (
        changed(
            ("correctness", "tolerances", "fp16", {"absolute": 2, "relative": -1}),
            ("correctness", "dtypes", ["fp16"]),
        ),
        [
            "correctness.tolerances.fp16.absolute = 2: must be at most 0.1",
            "correctness.tolerances.fp16.relative = -1: must be at least 0",
        ],
    ),
    "baseline that is not measured": (
        changed(("baseline", "naiv")),
        ['baseline = "naiv": is not in implementations; must be naive'],
    ),
    "baseline that is no name": (
        changed(("baseline", 1)),
        ["baseline = 1: must be the name of an implementation, or null, not a number"],
    ),
    "goal of what is not there": (
        changed(
            ("goals", "fast", {"implementation": "naiv", "against": ["sdpa", "naive"], "sweeps": ["articl"]})
        ),
        [
            'goals.fast.implementation = "naiv": is not in implementations; must be naive',
            'goals.fast.against[0] = "sdpa": is not in implementations; must be naive',
            'goals.fast.sweeps[0] = "articl": is not in sweeps; must be article',
        ],
    ),
    "goal against itself": (
        changed(("goals", "fast", {"implementation": "naive", "against": ["naive"], "speedup_each": 0})),
        [
            'goals.fast.against[0] = "naive": is the implementation itself',
            "goals.fast.speedup_each = 0: must be above 0",
        ],
    ),
    "goal without its implementation, over no length": (
        changed(("goals", "fast", {"against": [], "shortest_seq_len": 64, "longest_seq_len": 32})),
        [
            "goals.fast.against = []: must not be empty",
            "goals.fast.shortest_seq_len = 64: must not be above longest_seq_len = 32",
            "goals.fast.implementation: missing; must be the name of an implementation",
        ],
    ),
    "goal in a sweep that times one side of it": (
        changed(
            ("implementations", "sdpa", {"kernel": "sdpa"}),
            ("sweeps", "article", "implementations", ["naive"]),
            ("goals", "fast", {"implementation": "naive", "against": ["sdpa"]}),
            ("goals", "there", {"implementation": "naive", "against": ["sdpa"], "sweeps": ["article"]}),
        ),
        [
            "goals.fast: no sweep times its implementation beside one it is held against",
            "goals.there: no sweep times its implementation beside one it is held against",
            'goals.there.sweeps[0] = "article": does not time its implementation beside one it is held'
            " against",
        ],
    ),
    "too few samples": (
        changed(("timing", {"samples": 1, "samples_interpreted": 0, "processes": {"cuda": 0}})),
        [
            "timing.samples = 1: must be at least 2",
            "timing.samples_interpreted = 0: must be at least 2",
            "timing.processes.cuda = 0: must be at least 1",
        ],
    ),
    "samples as text": (
        changed(("timing", "samples", "50")),
        [f'timing.samples = "50": must be an integer of at least 2, not {NUMBER_AS_TEXT}'],
    ),
    "samples with a decimal point": (
        changed(("timing", "samples", 50.0)),
        ["timing.samples = 50.0: must be an integer of at least 2, not a number with a decimal point"],
    ),
    "timing key misspelt": (
        changed(("timing", "warmup_max_s", 1)),
        [f"timing.warmup_max_s = 1: unknown key; must be one of {TIMING_KEYS}; did you mean warm_up_max_s?"],
    ),
    "warm-up ends before it may": (
        changed(("timing", "warm_up_max_s", 0.2)),
        ["timing.warm_up_max_s = 0.2: must be at least timing.warm_up_min_s = 0.3"],
    ),
    "clock with a decimal point": (
        changed(("timing", "lock_sm_clock_mhz", 1500.5)),
        [f"timing.lock_sm_clock_mhz = 1500.5: must be {CLOCK}, not a number with a decimal point"],
    ),
    "clock as text": (
        changed(("timing", "lock_sm_clock_mhz", "1500")),
        [f'timing.lock_sm_clock_mhz = "1500": must be {CLOCK}, not {NUMBER_AS_TEXT}'],
    ),
    "clock switched off by a boolean": (
        changed(("timing", "lock_sm_clock_mhz", False)),
        [f"timing.lock_sm_clock_mhz = false: must be {CLOCK}, not {BOOLEAN}"],
    ),
    "clock too low": (
        changed(("timing", "lock_sm_clock_mhz", 0)),
        ["timing.lock_sm_clock_mhz = 0: must be at least 100"],
    ),
    "clock in kHz": (
        changed(("timing", "lock_sm_clock_mhz", 1500000)),
        ["timing.lock_sm_clock_mhz = 1500000: must be at most 10000"],
    ),
    "sweeps null": (
        changed(("sweeps", None)),
        [f"sweeps = null: must be a mapping, not {NULL}"],
    ),
    "sweeps empty": (
        changed(("sweeps", {})),
        ["sweeps = {}: must not be empty"],
    ),
    "sweep null": (
        changed(("sweeps", "article", None)),
        [f"sweeps.article = null: must be a mapping, not {NULL}"],
    ),
    "sweep empty": (
        changed(("sweeps", "article", {})),
        [
            "sweeps.article.heads: missing; must be an integer of at least 1",
            "sweeps.article.head_dim: missing; must be an integer from 8 to 512",
            "sweeps.article.dtype: missing; must be one of fp16, bf16",
            "sweeps.article.seq_lens: missing; must be a mapping",
            "sweeps.article.batch: missing; must be an integer of at least 1; or give tokens",
            "sweeps.article.causal: missing; must be true or false",
        ],
    ),
    "sweep with a batch and tokens": (
        changed(("sweeps", "article", "tokens", 4096)),
        ["sweeps.article.tokens = 4096: must not be given beside batch, which it stands in for"],
    ),
    "sweep of no tokens": (
        changed(("sweeps", "article", "batch", ...), ("sweeps", "article", "tokens", 0)),
        ["sweeps.article.tokens = 0: must be at least 1"],
    ),
    "attention with a key of decode": (
        changed(("sweeps", "article", "queries", 2)),
        ["sweeps.article.queries = 2: is for the workload decode"],
    ),
    "decode with a mask": (
        changed(("sweeps", "article", "workload", "decode")),
        [
            "sweeps.article.causal = false: leave it out: decode's mask is always causal, aligned to the "
            "bottom right"
        ],
    ),
    "decode that no kernel answers": (
        changed(("sweeps", "article", "workload", "decode"), ("sweeps", "article", "causal", ...)),
        ['sweeps.article.workload = "decode": no kernel of the implementations defines decode()'],
    ),
    "decode of more queries than the kernels take": (
        changed(
            ("sweeps", "article", "workload", "decode"),
            ("sweeps", "article", "causal", ...),
            ("sweeps", "article", "queries", 9),
        ),
        [
            "sweeps.article.queries = 9: must be at most 8",
        ],
    ),
    "sweep named as a target": (
        changed(("sweeps", "report", SWEEP), ("sweeps", "seq_len_512", SWEEP)),
        [
            "sweeps.report: is a target's name; choose another",
            "sweeps.seq_len_512: is a target's name; choose another",
        ],
    ),
    "sweep's name with a space": (
        changed(("sweeps", "my sweep", SWEEP)),
        [f'sweeps["my sweep"]: must be {NAME}'],
    ),
    "length zero": (
        sweep(seq_lens={"cuda": [512, 1024, 0]}),
        ["sweeps.article.seq_lens.cuda[2] = 0: must be at least 1"],
    ),
    "length a boolean": (
        sweep(seq_lens={"cuda": [512, True]}),
        [f"sweeps.article.seq_lens.cuda[1] = true: must be an integer of at least 1, not {BOOLEAN}"],
    ),
    "length as text": (
        sweep(seq_lens={"cuda": ["512"]}),
        [f'sweeps.article.seq_lens.cuda[0] = "512": must be an integer of at least 1, not {NUMBER_AS_TEXT}'],
    ),
    "lengths null": (
        sweep(seq_lens={"cuda": None}),
        [f"sweeps.article.seq_lens.cuda = null: must be {COUNTS_OR_NONE}, not {NULL}"],
    ),
    "lengths one number": (
        sweep(seq_lens={"cuda": 512}),
        [f"sweeps.article.seq_lens.cuda = 512: must be {COUNTS_OR_NONE}, not a number"],
    ),
    "length twice": (
        sweep(seq_lens={"cuda": [512, 1024, 512, 512]}),
        [
            "sweeps.article.seq_lens.cuda[2] = 512: must not be listed again, it is at [0]",
            "sweeps.article.seq_lens.cuda[3] = 512: must not be listed again, it is at [0]",
        ],
    ),
    "no length at all": (
        sweep(seq_lens={"cuda": []}),
        [
            'sweeps.article.seq_lens = {"cuda": [], "cpu": []}: '
            "must have at least one length, for cuda or for cpu"
        ],
    ),
    "lengths of an unknown device": (
        sweep(seq_lens={"cuda": [512], "gpu": [512]}),
        ["sweeps.article.seq_lens.gpu = [512]: unknown key; must be one of cuda, cpu"],
    ),
    "head_dim out of range": (
        changed(
            ("sweeps", "article", "head_dim", 4),
            ("sweeps", "other", {**SWEEP, "head_dim": 1024}),
        ),
        [
            "sweeps.article.head_dim = 4: must be at least 8",
            "sweeps.other.head_dim = 1024: must be at most 512",
        ],
    ),
    "causal as text": (
        sweep(causal="false"),
        ['sweeps.article.causal = "false": must be true or false, not text'],
    ),
    "dtype unknown": (
        sweep(dtype="fp32"),
        ['sweeps.article.dtype = "fp32": must be one of fp16, bf16'],
    ),
    "kv_heads that do not divide heads": (
        sweep(kv_heads=5),
        ["sweeps.article.kv_heads = 5: must divide sweeps.article.heads = 16"],
    ),
    "kv_heads more than heads": (
        sweep(kv_heads=32),
        ["sweeps.article.kv_heads = 32: must divide sweeps.article.heads = 16"],
    ),
    "kv_heads zero": (
        sweep(kv_heads=0),
        ["sweeps.article.kv_heads = 0: must be at least 1"],
    ),
    "implementation not defined": (
        sweep(implementations=["naive", "naiv", "zzz"]),
        [
            'sweeps.article.implementations[1] = "naiv": is not in implementations; must be naive',
            'sweeps.article.implementations[2] = "zzz": is not in implementations; must be naive',
        ],
    ),
    "implementations of a sweep empty": (
        sweep(implementations=[]),
        ["sweeps.article.implementations = []: must not be empty"],
    ),
    "implementations of a sweep not text": (
        sweep(implementations=[1, []]),
        [
            "sweeps.article.implementations[0] = 1: must be the name of an implementation, not a number",
            "sweeps.article.implementations[1] = []: must be the name of an implementation, not a list",
        ],
    ),
    "folders to collect that are none": (
        changed(("collect", ["results", "", 7])),
        [
            'collect[1] = "": must be the name of a folder',
            "collect[2] = 7: must be the name of a folder, not a number",
        ],
    ),
    "nothing to measure": (
        sweep(measure=[]),
        ["sweeps.article.measure = []: must not be empty"],
    ),
    "measure unknown and twice": (
        sweep(measure=["timing", "speed", "timing"]),
        [
            'sweeps.article.measure[1] = "speed": must be one of timing, memory',
            'sweeps.article.measure[2] = "timing": must not be listed again, it is at [0]',
        ],
    ),
    "faults of every sort at once": (
        changed(
            ("devise", "cpu"),
            ("time_limit_s", -1),
            ("implementations", "x", {"kernel": "sdpa", "options": {"backend": "nope"}}),
            ("timing", {"samples": 1, "warm_up_min_s": 6}),
            ("sweeps", "article", "batch", ...),
            ("sweeps", "article", "kv_head", 4),
            ("sweeps", "article", "kv_heads", 3),
            ("sweeps", "article", "implementations", ["y"]),
        ),
        [
            'implementations.x.options.backend = "nope": must be one of default, cudnn',
            f"sweeps.article.kv_head = 4: unknown key; must be one of {SWEEP_KEYS}; did you mean kv_heads?",
            "sweeps.article.kv_heads = 3: must divide sweeps.article.heads = 16",
            'sweeps.article.implementations[0] = "y": is not in implementations; must be one of naive, x',
            "sweeps.article.batch: missing; must be an integer of at least 1; or give tokens",
            f'devise = "cpu": unknown key; must be one of {TOP_KEYS}; did you mean device?',
            "time_limit_s = -1: must be above 0",
            "timing.samples = 1: must be at least 2",
            "timing.warm_up_max_s = 5.0: must be at least timing.warm_up_min_s = 6.0",
        ],
    ),
}


@pytest.mark.parametrize(("raw", "faults"), BAD.values(), ids=BAD)
def test_every_fault_is_one_line(raw, faults, kernels):
    with pytest.raises(ConfigError) as raised:
        load_config(raw, kernels)
    assert raised.value.faults == [f"config: {fault}" for fault in faults]
    assert str(raised.value).splitlines() == raised.value.faults


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "sdpa", "options": {"backend": "cudnn"}},
        {"kernel": "triton_flash", "options": {"stages": 2, "block_m": 128, "order": False, "eps": 1}},
        {"kernel": "triton_flash", "options": {"stages": None, "free": "anything"}},
        {"kernel": "demanding", "options": {"tile": 16}},
    ],
)
def test_allowed_options_are_kept_as_given(options, kernels):
    config = load_config(implementation(**options), kernels)
    assert json.dumps(config["implementations"]["x"]) == json.dumps(options)


def test_two_names_for_one_kernel_are_allowed(kernels):
    config = load_config(implementation(kernel="naive"), kernels)
    assert config["implementations"]["x"] == config["implementations"]["naive"]


def test_kernels_are_files_that_define_attention(kernels):
    assert available_kernels(kernels) == KERNEL_LIST.split(", ")


def test_defaults_are_filled_in(kernels):
    config = load_config(MINIMAL, kernels)
    assert config["device"] == "auto"
    assert config["implementations"] == {"naive": {"kernel": "naive", "options": {}}}
    assert config["correctness"]["heads"] == {"cuda": 16, "cpu": 2}
    assert config["timing"]["samples"] == 30
    assert config["timing"]["processes"] == {"cuda": 5, "cpu": 3}
    assert config["sweeps"]["article"] == {
        **SWEEP,
        "workload": "attention",
        "kv_heads": 16,
        "queries": 1,
        "lengths": "equal",
        "page_size": 0,
        "measure": ["timing", "memory"],
        "implementations": ["naive"],
    }


def test_a_default_is_not_shared_between_loads(kernels):
    load_config(MINIMAL, kernels)["correctness"]["causal"].clear()
    assert load_config(MINIMAL, kernels)["correctness"]["causal"] == [False, True]


def test_one_device_of_the_grid_keeps_the_default_of_the_other(kernels):
    config = load_config(changed(("correctness", "seq_lens", {"cpu": [16]})), kernels)
    assert config["correctness"]["seq_lens"]["cpu"] == [16]
    assert config["correctness"]["seq_lens"]["cuda"][0] == 128


def test_one_tolerance_is_enough_where_one_dtype_is_used(kernels):
    tolerances = {"fp16": {"absolute": 0.01, "relative": 0.01}}
    config = load_config(changed(("correctness", {"dtypes": ["fp16"], "tolerances": tolerances})), kernels)
    assert config["correctness"]["tolerances"] == tolerances


def test_5_and_5_0_are_the_same_configuration(kernels):
    whole, fraction = (load_config(changed(("time_limit_s", limit)), kernels) for limit in (5, 5.0))
    assert json.dumps(whole) == json.dumps(fraction)


def test_the_order_of_names_is_kept_and_that_of_keys_is_the_schemas(kernels):
    turned = {"sweeps": {"z": SWEEP, "a": SWEEP}, "implementations": MINIMAL["implementations"]}
    config = load_config(turned, kernels)
    assert list(config["sweeps"]) == ["z", "a"]
    assert list(config) == list(load_schema()["properties"])


@pytest.mark.parametrize("raw", [MINIMAL, sweep(seq_lens={"cuda": [0]})], ids=["good", "bad"])
def test_the_input_is_not_changed(raw, kernels):
    before = copy.deepcopy(raw)
    try:
        config = load_config(raw, kernels)
    except ConfigError:
        pass
    else:
        config["sweeps"]["article"]["seq_lens"]["cuda"].append(1)
    assert raw == before


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "config").glob("*.yaml")))
def test_shipped_configs_are_valid(name):
    raw = yaml.safe_load((ROOT / "config" / name).read_text())
    config = load_config(raw, ROOT / "kernels")
    assert json.loads(json.dumps(config, allow_nan=False)) == config


def test_the_default_config_writes_out_the_schemas_defaults():
    raw = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    # Which implementation is the baseline is a choice, as the implementations are, and so are option sets.
    raw["static_profile"]["options"] = {}
    needed = {key: raw[key] for key in (*load_schema()["required"], "baseline")}
    assert load_config(needed, ROOT / "kernels") == load_config(raw, ROOT / "kernels")


def test_the_schema_is_a_schema_with_every_key_described():
    schema = load_schema()
    Draft202012Validator.check_schema(schema)

    def undescribed(below, keys=()):
        for name, value in below.get("properties", {}).items():
            if "description" not in value:
                yield (*keys, name)
            yield from undescribed(value, (*keys, name))
        if isinstance(below.get("additionalProperties"), dict):
            yield from undescribed(below["additionalProperties"], (*keys, "*"))

    assert list(undescribed(schema)) == []


def test_no_sweep_may_be_named_as_a_rule():
    reserved = load_schema()["properties"]["sweeps"]["propertyNames"]["not"]["anyOf"][0]["enum"]
    sources = [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]
    rules = {
        name
        for source in sources
        if source.exists()
        for name in re.findall(r"^\s*(?:rule|checkpoint)\s+(\w+)\s*:", source.read_text(), re.MULTILINE)
    }
    assert rules <= set(reserved), "add these rules to the schema's list"


def test_readme_has_the_schemas_keys():
    check = subprocess.run([sys.executable, RENDER, "--check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


def test_nothing_slow_is_imported():
    code = "import sys, workflow.config; print(*{'torch', 'pandas', 'jsonschema', 'yaml'} & set(sys.modules))"
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert imported.stdout.strip() == ""


def test_every_number_of_the_configuration_says_its_unit_or_counts_something():
    """Units are in the names; what has none is a count, a size in elements or a fraction."""
    units = ("_s", "_mhz", "_ms", "_bytes", "_seq_len")
    counts = [
        "absolute",
        "batch",
        "batches",
        "candidates",
        "cpu",
        "cuda",
        "group_sizes",
        "head_dim",
        "head_dims",
        "heads",
        "kv_heads",
        "processes",
        "queries",
        "relative",
        "rounds",
        "samples",
        "samples_interpreted",
        "second_timer_seq_lens",
        "seq_lens",
        "speedup_each",
        "speedup_geometric_mean",
        "tokens",
    ]
    schema = load_schema()
    numbers = set()

    def look(part, name):
        part = resolve(part, schema)
        kinds = part.get("type", [])
        if {"integer", "number"} & set([kinds] if isinstance(kinds, str) else kinds):
            numbers.add(name)
        for key, below in part.get("properties", {}).items():
            look(below, key)
        for keyword in ("items", "additionalProperties"):
            if isinstance(part.get(keyword), dict):
                look(part[keyword], name)

    look(schema, "")
    assert {"time_limit_s", "lock_sm_clock_mhz", "head_dim"} <= numbers
    assert {name for name in numbers if not name.endswith(units) and name not in counts} <= {"options"}


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_study_that_comes_with_the_project_is_a_plan_for_a_gpu(path):
    config = load_config(yaml.safe_load(path.read_text(encoding="utf-8")), ROOT / "kernels")
    plan = Plan(config, "cuda", "an_h200", ROOT)
    timed = {(job.sweep, job.implementation) for job in plan.jobs() if job.phase == TIMING}
    for sweep, settings in config["sweeps"].items():
        contenders = {name for name in config["implementations"] if plan.answers(name, settings["workload"])}
        assert {name for found, name in timed if found == sweep} == contenders
        assert len(contenders) > 2


@pytest.mark.parametrize(("device", "contexts"), [("cuda", {1, 63, 65, 1000, 4097}), ("cpu", {1, 63, 65})])
def test_the_default_run_checks_decode_on_a_wide_grid(device, contexts):
    raw = yaml.safe_load((ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))
    plan = Plan(load_config(raw, ROOT / "kernels"), device, "a_machine", ROOT)
    grid = [
        problem
        for job in plan.jobs()
        if job.phase == CORRECTNESS and job.implementation == "triton_decode"
        for problem in job.spec["problems"]
    ]
    assert len(grid) >= 96
    assert {problem["workload"] for problem in grid} == {"decode"}
    assert {problem["seq_len_k"] for problem in grid} >= contexts
    assert {problem["heads"] // problem["kv_heads"] for problem in grid} == {1, 4}
    for key, values in (("head_dim", {64, 128}), ("batch", {1, 4}), ("dtype", {"fp16", "bf16"})):
        assert {problem[key] for problem in grid} == values
    assert {problem["lengths"] for problem in grid} == {"equal", "uneven", "some_empty"}
    assert max(problem["page_size"] for problem in grid) > 0
