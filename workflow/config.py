"""The configuration: checked in full before anything runs, with its defaults filled in.

The schema (workflow/schemas/config.schema.yaml) says which keys there are, what each may be, what it
means and what it is when left out. This module turns what the schema does not allow into one line a
fault, and adds the checks that compare one key with another or with the kernels' source.

The Snakefile imports this module, so it imports nothing slow: no torch, and jsonschema only on use.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.digest import defines_function
from harness.problem import ATTENTION, DECODE, WORKLOADS

SCHEMA_FILE = Path(__file__).parent / "schemas" / "config.schema.yaml"

# These parameters of a kernel's functions are passed by the harness, and are therefore no options.
HARNESS_PARAMETERS = ("causal", "scale", "seq_lens", "block_table")
# Keys of a sweep that only its workload has, and what they are where they are left out.
DECODE_KEYS = {"queries": 1, "lengths": "equal", "page_size": 0}

LARGEST_NUMBER = sys.float_info.max

Schema = dict[str, Any]
Keys = tuple[str | int, ...]

_NO_VALUE = object()


class ConfigError(ValueError):
    """A configuration that is not allowed; `faults` has one line for each reason."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass
class _Faults:
    """The faults found so far, and the keys whose values no further check can rely on."""

    lines: dict[str, Keys] = field(default_factory=dict)
    unusable: set[Keys] = field(default_factory=set)

    def add(self, keys: Keys, problem: str, value: Any = _NO_VALUE, usable: bool = False) -> None:
        shown = "" if value is _NO_VALUE else f" = {_shown(value)}"
        self.lines[f"config: {_dotted(keys)}{shown}: {problem}"] = keys
        if not usable:
            self.unusable.add(keys)

    def error(self, raw: Any) -> ConfigError:
        """What to raise: the faults in the order in which the config has the keys, missing ones last."""

        def position(line: str) -> list[int]:
            places, value = [], raw
            for key in self.lines[line]:
                inside: list[Any] = []
                if isinstance(value, Mapping | list | tuple):
                    inside = list(value) if isinstance(value, Mapping) else list(range(len(value)))
                places.append(inside.index(key) if key in inside else len(inside))
                value = value[key] if key in inside else None
            return places

        return ConfigError(sorted(self.lines, key=position))

    def sound(self, *keys: str | int) -> bool:
        """Whether neither the value below `keys` nor anything it lies in is at fault."""
        return not any(keys[:length] in self.unusable for length in range(len(keys) + 1))


def load_config(raw: Mapping[str, Any], kernels_folder: Path) -> dict[str, Any]:
    """Check `raw` and return a copy of it with every default filled in, ready for JSON.

    Every key of the schema is in the result, in the schema's order; sweeps and implementations keep
    theirs. Raises ConfigError with all faults, not only the first.
    """
    schema = load_schema()
    faults = _Faults()
    plain = _plain(raw, (), faults)
    _check_schema(plain, schema, faults)
    if not faults.sound():
        raise faults.error(raw)
    config: dict[str, Any] = _with_defaults(plain, schema, schema)
    _check_environment(config, faults)
    _check_implementations(config, kernels_folder, faults)
    _check_static_profile(config, kernels_folder, faults)
    _check_baseline(config, faults)
    _check_goals(config, faults)
    _check_warm_up(config, faults)
    _check_sweeps(config, faults)
    _check_workloads(config, kernels_folder, faults)
    _check_tolerances(config, faults)
    if faults.lines:
        raise faults.error(raw)
    for sweep in config["sweeps"].values():
        sweep.setdefault("kv_heads", sweep["heads"])
        sweep.setdefault("implementations", _answering(config, sweep["workload"], kernels_folder))
        if sweep["workload"] == DECODE:
            sweep["causal"] = True
    for name, goal in config["goals"].items():
        timed = _sweeps_of(goal, config)
        for index, sweep in enumerate(goal.setdefault("sweeps", timed)):
            if sweep not in timed:
                problem = "does not time its implementation beside one it is held against"
                faults.add(("goals", name, "sweeps", index), problem, sweep)
        if not timed:
            faults.add(("goals", name), "no sweep times its implementation beside one it is held against")
    if faults.lines:
        raise faults.error(raw)
    return config


def load_schema() -> Schema:
    """The schema as a dictionary."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    schema: Schema = yaml.load(SCHEMA_FILE.read_text(encoding="utf-8"), Loader=loader)
    return schema


def resolve(schema: Schema, root: Schema) -> Schema:
    """`schema` with what it refers to (`#/$defs/<name>`) merged in; its own keywords win."""
    if "$ref" not in schema:
        return schema
    return {**root["$defs"][schema["$ref"].rpartition("/")[2]], **schema}


def allowed(schema: Schema, root: Schema) -> str:
    """What a schema allows, in words that go on from "must be"."""
    schema = resolve(schema, root)
    if "x-allowed" in schema:
        return str(schema["x-allowed"])
    if "enum" in schema:
        return _one_of(schema["enum"])
    if schema["type"] == "array":
        empty = "not empty, " if schema.get("minItems") else ""
        return f"a list, {empty}without duplicates, each {allowed(schema['items'], root)}"
    nouns = {"integer": "an integer", "number": "a number", "boolean": "true or false", "object": "a mapping"}
    return nouns[schema["type"]] + _range(schema)


def _range(schema: Schema) -> str:
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']}"
    if "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    return f" of at least {schema['minimum']}" if "minimum" in schema else ""


# --- What the schema says ---------------------------------------------------------------------


def _plain(value: Any, keys: Keys, faults: _Faults) -> Any:
    """A deep copy made of plain dictionaries and lists; a name that is not text is a fault."""
    if isinstance(value, Mapping):
        copied = {}
        for name, item in value.items():
            if isinstance(name, str):
                copied[name] = _plain(item, (*keys, name), faults)
            else:
                problem = f"a key must be text, not {_kind(name)}; put it in quotes if it is meant"
                faults.add((*keys, name), problem, item)
        return copied
    if isinstance(value, list | tuple):
        return [_plain(item, (*keys, index), faults) for index, item in enumerate(value)]
    return value


def _check_schema(config: Any, schema: Schema, faults: _Faults) -> None:
    from jsonschema import Draft202012Validator, ValidationError, validators

    # Stricter than JSON schema's: 512.0 is no integer, infinity is no number, and a pattern is
    # matched by the whole text (Python's $ allows a line break behind it).
    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: type(value) is int,
            "number": lambda _, value: type(value) in (int, float) and abs(value) <= LARGEST_NUMBER,
        }
    )

    def whole_pattern(_: Any, pattern: str, value: Any, __: Schema) -> Iterator[ValidationError]:
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            yield ValidationError(pattern)

    strict = validators.extend(Draft202012Validator, {"pattern": whole_pattern}, type_checker=types)
    validator = strict(schema)
    for error in validator.iter_errors(config):
        _add_schema_fault(error, schema, faults)


def _add_schema_fault(error: Any, root: Schema, faults: _Faults) -> None:
    """Turn one error of jsonschema into the lines of its faults."""
    keys, value, limit = tuple(error.absolute_path), error.instance, error.validator_value
    if "propertyNames" in error.absolute_schema_path:
        taken = error.validator == "not"
        problem = "is a target's name; choose another" if taken else f"must be {allowed(error.schema, root)}"
        faults.add((*keys, value), problem, usable=True)
        return
    match error.validator:
        case "additionalProperties":
            known = list(error.schema.get("properties", {}))
            for name in value:
                if name not in known:
                    faults.add((*keys, name), f"unknown key; {_instead(name, known)}", value[name])
        case "required":
            for name in limit:
                if name not in value:
                    wanted = allowed(error.schema["properties"][name], root)
                    faults.add((*keys, name), f"missing; must be {wanted}")
        case "uniqueItems":
            for index, item in enumerate(value):
                first = next(i for i, other in enumerate(value) if _same(item, other))
                if first < index:
                    faults.add((*keys, index), f"must not be listed again, it is at [{first}]", item)
        case "type":
            wanted = allowed(error.schema, root)
            faults.add(keys, f"must be {wanted}, not {_kind(value)}", value)
        case "minimum":
            faults.add(keys, f"must be at least {limit}", value)
        case "maximum":
            faults.add(keys, f"must be at most {limit}", value)
        case "exclusiveMinimum":
            faults.add(keys, f"must be above {limit}", value)
        case "minItems" | "minProperties":
            faults.add(keys, "must not be empty", value)
        case _:
            faults.add(keys, f"must be {allowed(error.schema, root)}", value)


def _with_defaults(value: Any, schema: Schema, root: Schema) -> Any:
    """`value` with the schema's defaults where keys are missing; unknown keys are left out.

    A number that may have a fraction becomes a float: 5 and 5.0 are the same configuration.
    """
    schema = resolve(schema, root)
    if schema.get("type") == "number" and type(value) is int and abs(value) <= LARGEST_NUMBER:
        return float(value)
    if not isinstance(value, dict):
        return value
    filled = {}
    for name, below in schema.get("properties", {}).items():
        if name in value:
            filled[name] = _with_defaults(value[name], below, root)
        elif "default" in (resolved := resolve(below, root)):
            filled[name] = _with_defaults(copy.deepcopy(resolved["default"]), below, root)
    if isinstance(others := schema.get("additionalProperties"), dict):
        filled |= {
            name: _with_defaults(item, others, root) for name, item in value.items() if name not in filled
        }
    return filled


# --- What it does not say: one key against another ---------------------------------------------


def _entries(config: dict[str, Any], section: str, faults: _Faults) -> Iterator[tuple[str, Any]]:
    """The name and value of every entry of `implementations` or `sweeps`, where there are any."""
    if faults.sound(section):
        yield from config[section].items()


def _check_warm_up(config: dict[str, Any], faults: _Faults) -> None:
    if not (faults.sound("timing", "warm_up_min_s") and faults.sound("timing", "warm_up_max_s")):
        return
    shortest, longest = config["timing"]["warm_up_min_s"], config["timing"]["warm_up_max_s"]
    if longest < shortest:
        problem = f"must be at least timing.warm_up_min_s = {shortest}"
        faults.add(("timing", "warm_up_max_s"), problem, longest)


def _check_sweeps(config: dict[str, Any], faults: _Faults) -> None:
    for name, sweep in _entries(config, "sweeps", faults):
        keys = ("sweeps", name)
        if not faults.sound(*keys):
            continue
        if "batch" not in sweep and "tokens" not in sweep:
            faults.add((*keys, "batch"), "missing; must be an integer of at least 1; or give tokens")
        elif "batch" in sweep and "tokens" in sweep:
            problem = "must not be given beside batch, which it stands in for"
            faults.add((*keys, "tokens"), problem, sweep["tokens"])
        if faults.sound(*keys, "heads") and faults.sound(*keys, "kv_heads"):
            heads, kv_heads = sweep["heads"], sweep.get("kv_heads", 1)
            problem = f"must divide {_dotted((*keys, 'heads'))} = {heads}"
            if heads % kv_heads:
                faults.add((*keys, "kv_heads"), problem, kv_heads)
        lengths = [(*keys, "seq_lens"), (*keys, "seq_lens", "cuda"), (*keys, "seq_lens", "cpu")]
        if all(faults.sound(*place) for place in lengths) and not any(sweep["seq_lens"].values()):
            problem = "must have at least one length, for cuda or for cpu"
            faults.add((*keys, "seq_lens"), problem, sweep["seq_lens"])
        if not (faults.sound("implementations") and faults.sound(*keys, "implementations")):
            continue
        known = list(config["implementations"])
        for index, implementation in enumerate(sweep.get("implementations", [])):
            place = (*keys, "implementations", index)
            if faults.sound(*place) and implementation not in known:
                problem = f"is not in implementations; {_instead(implementation, known)}"
                faults.add(place, problem, implementation)


def _check_environment(config: dict[str, Any], faults: _Faults) -> None:
    if not (faults.sound("device") and faults.sound("environment")):
        return
    if config["environment"] is not None and config["device"] == "auto":
        problem = "must be cuda or cpu where environment is given: another machine's is not looked up here"
        faults.add(("device",), problem, "auto")


def _answering(config: dict[str, Any], workload: str, folder: Path) -> list[str]:
    """The implementations whose kernel answers the workload."""
    return [
        name
        for name, implementation in config["implementations"].items()
        if defines_function(folder / f"{implementation['kernel']}.py", workload)
    ]


def _check_workloads(config: dict[str, Any], folder: Path, faults: _Faults) -> None:
    """Faults of keys that a sweep's workload has not, or needs, and of implementations that lack it."""
    for name, sweep in _entries(config, "sweeps", faults):
        keys = ("sweeps", name)
        if not (faults.sound(*keys) and faults.sound(*keys, "workload")):
            continue
        workload = sweep["workload"]
        if workload == ATTENTION:
            if "causal" not in sweep:
                faults.add((*keys, "causal"), "missing; must be true or false")
            for key, default in DECODE_KEYS.items():
                if faults.sound(*keys, key) and sweep[key] != default:
                    faults.add((*keys, key), "is for the workload decode", sweep[key])
        elif "causal" in sweep:
            problem = "leave it out: decode's mask is always causal, aligned to the bottom right"
            faults.add((*keys, "causal"), problem, sweep["causal"])
        if faults.lines:  # the kernels' source may be what is at fault
            continue
        answering = _answering(config, workload, folder)
        if not answering:
            problem = f"no kernel of the implementations defines {workload}()"
            faults.add((*keys, "workload"), problem, workload)
        for index, implementation in enumerate(sweep.get("implementations", [])):
            if implementation not in answering:
                kernel = config["implementations"][implementation]["kernel"]
                problem = f"cannot take part: kernels/{kernel}.py defines no {workload}()"
                faults.add((*keys, "implementations", index), problem, implementation)


def _check_baseline(config: dict[str, Any], faults: _Faults) -> None:
    if not (faults.sound("baseline") and faults.sound("implementations")):
        return
    baseline, known = config["baseline"], list(config["implementations"])
    if baseline is not None and baseline not in known:
        faults.add(("baseline",), f"is not in implementations; {_instead(baseline, known)}", baseline)


def _check_goals(config: dict[str, Any], faults: _Faults) -> None:
    for name, goal in _entries(config, "goals", faults):
        keys: Keys = ("goals", name)
        if not faults.sound(*keys):
            continue
        mine = goal.get("implementation")
        _check_names(config, "implementations", [((*keys, "implementation"), mine)], faults)
        for section, key in (("implementations", "against"), ("sweeps", "sweeps")):
            if faults.sound(*keys, key):
                named = [((*keys, key, index), value) for index, value in enumerate(goal.get(key, []))]
                _check_names(config, section, named, faults)
        for index, rival in enumerate(goal["against"] if faults.sound(*keys, "against") else []):
            if rival == mine:
                faults.add((*keys, "against", index), "is the implementation itself", rival)
        limits = ("shortest_seq_len", "longest_seq_len")
        if all(faults.sound(*keys, limit) and goal[limit] is not None for limit in limits):
            shortest, longest = (goal[limit] for limit in limits)
            if shortest > longest:
                problem = f"must not be above longest_seq_len = {longest}"
                faults.add((*keys, "shortest_seq_len"), problem, shortest)


def _check_names(
    config: dict[str, Any], section: str, named: Iterable[tuple[Keys, Any]], faults: _Faults
) -> None:
    """A fault for each name, given with its keys, that the section has no entry for."""
    if faults.sound(section):
        known = list(config[section])
        for keys, name in named:
            if faults.sound(*keys) and name not in known:
                faults.add(keys, f"is not in {section}; {_instead(name, known)}", name)


def _sweeps_of(goal: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """The sweeps that time the goal's implementation and one that it is held against."""
    return [
        name
        for name, sweep in config["sweeps"].items()
        if "timing" in sweep["measure"]
        and goal["implementation"] in sweep["implementations"]
        and set(goal["against"]) & set(sweep["implementations"])
    ]


def _check_tolerances(config: dict[str, Any], faults: _Faults) -> None:
    """A fault for every dtype that is used and has no tolerance."""
    keys = ("correctness", "tolerances")
    if not faults.sound(*keys):
        return
    users: dict[str, list[str]] = {}
    decodes = any(
        faults.sound("sweeps", name) and sweep["workload"] == DECODE
        for name, sweep in _entries(config, "sweeps", faults)
    )
    for grid in (("correctness",), ("correctness", DECODE)):
        dtypes: Keys = (*grid, "dtypes")
        if not faults.sound(*dtypes) or (len(grid) == 2 and not decodes):
            continue
        settings = config["correctness"] if len(grid) == 1 else config["correctness"][DECODE]
        for index, dtype in enumerate(settings["dtypes"]):
            if faults.sound(*dtypes, index):
                users.setdefault(dtype, []).append(_dotted(dtypes))
    for name, sweep in _entries(config, "sweeps", faults):
        if faults.sound("sweeps", name, "dtype"):
            users.setdefault(sweep["dtype"], []).append(_dotted(("sweeps", name, "dtype")))
    for dtype, places in users.items():
        if dtype not in config["correctness"]["tolerances"]:
            faults.add((*keys, dtype), f"missing; {dtype} is used by {', '.join(places)}")


# --- What it does not say: the kernels' source ------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """A keyword-only parameter of a kernel's function: the values and types it takes, None if not known."""

    alternatives: list[Any] | None
    required: bool


class _SourceError(Exception):
    """A kernel's source that is not there, does not parse, or answers no workload."""


def available_kernels(folder: Path) -> list[str]:
    """The kernels of a folder: its files, but for those named `_*`, that answer a workload."""
    kernels = []
    for path in sorted(folder.glob("[!_]*.py")):
        try:
            _options(path)
        except _SourceError:
            continue
        kernels.append(path.stem)
    return kernels


def _check_implementations(config: dict[str, Any], folder: Path, faults: _Faults) -> None:
    for name, implementation in _entries(config, "implementations", faults):
        keys = ("implementations", name)
        if not faults.sound(*keys, "kernel"):
            continue
        kernel = implementation["kernel"]
        try:
            options = _options(folder / f"{kernel}.py")
        except _SourceError as fault:
            instead = _instead(kernel, available_kernels(folder), "there is no kernel at all")
            faults.add((*keys, "kernel"), f"{fault}; {instead}", kernel)
            continue
        if faults.sound(*keys, "options"):
            _check_options(implementation["options"], options, kernel, (*keys, "options"), faults)


def _check_static_profile(config: dict[str, Any], folder: Path, faults: _Faults) -> None:
    keys = ("static_profile", "options")
    if not faults.sound(*keys):
        return
    for kernel, sets in config["static_profile"]["options"].items():
        if not faults.sound(*keys, kernel):
            continue
        try:
            options = _options(folder / f"{kernel}.py")
        except _SourceError as fault:
            instead = _instead(kernel, available_kernels(folder), "there is no kernel at all")
            faults.add((*keys, kernel), f"{fault}; {instead}")
            continue
        for index, given in enumerate(sets):
            place = (*keys, kernel, index)
            if faults.sound(*place):
                _check_options(given, options, kernel, place, faults)


def _check_options(
    given: dict[str, Any], options: dict[str, _Option], kernel: str, keys: Keys, faults: _Faults
) -> None:
    for name, value in given.items():
        if not faults.sound(*keys, name):
            continue
        if name not in options:
            instead = _instead(name, list(options), f"kernel {kernel} takes no options")
            faults.add((*keys, name), f"unknown option; {instead}", value)
            continue
        alternatives = options[name].alternatives
        if alternatives is not None and not any(_is_of(value, one) for one in alternatives):
            faults.add((*keys, name), f"must be {_alternatives_text(alternatives)}", value)
    for name, option in options.items():
        if option.required and name not in given:
            faults.add((*keys, name), f"missing; kernel {kernel} has no default for it")


def _options(path: Path) -> dict[str, _Option]:
    """The options of the kernel in a file, read from its source; raises _SourceError."""
    place = f"{path.parent.name}/{path.name}"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError:
        raise _SourceError(f"there is no {place}") from None
    except (OSError, SyntaxError, ValueError) as fault:
        raise _SourceError(f"{place} is not readable as Python ({_first_line(fault)})") from fault
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in WORKLOADS
    }
    if not functions:
        raise _SourceError(f"{place} defines no function {' or '.join(WORKLOADS)} at top level")
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        parameter.arg: _Option(_alternatives(parameter.annotation, names), required=default is None)
        for function in functions.values()
        for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if parameter.arg not in HARNESS_PARAMETERS
    }


def _alternatives(annotation: ast.expr | None, names: dict[str, ast.expr]) -> list[Any] | None:
    """The values and types that an annotation allows; None where it says more than this can read.

    Read are Literal, int, float, bool, str, None, unions of these, and names assigned to them.
    """
    match annotation:
        case ast.Constant(value=None):
            return [None]
        case ast.Constant(value=str(text)):
            try:
                return _alternatives(ast.parse(text, mode="eval").body, names)
            except SyntaxError:
                return None
        case ast.Name(id="int" | "float" | "bool" | "str" as name):
            return [{"int": int, "float": float, "bool": bool, "str": str}[name]]
        case ast.Name(id=name) if name in names:
            others = {other: value for other, value in names.items() if other != name}
            return _alternatives(names[name], others)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            sides = [_alternatives(left, names), _alternatives(right, names)]
            return None if None in sides else [one for side in sides if side for one in side]
        case ast.Subscript(value=ast.Name(id=head) | ast.Attribute(attr=head), slice=inner):
            if head == "Optional":
                some = _alternatives(inner, names)
                return None if some is None else [*some, None]
            if head == "Literal":
                try:
                    values = ast.literal_eval(inner)
                except ValueError:
                    return None
                return list(values) if isinstance(inner, ast.Tuple) else [values]
    return None


def _is_of(value: Any, alternative: Any) -> bool:
    """Whether a value is an alternative, or of it where that is a type; True is no integer."""
    if isinstance(alternative, type):
        return type(value) is alternative or (alternative is float and type(value) is int)
    return _same(value, alternative)


def _alternatives_text(alternatives: list[Any]) -> str:
    nouns = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    types = [nouns[one] for one in alternatives if isinstance(one, type)]
    values = [one for one in alternatives if not isinstance(one, type)]
    return " or ".join(types + ([_one_of(values)] if values else []))


# --- Wording ------------------------------------------------------------------------------------


def _dotted(keys: Keys) -> str:
    """A path into the config, as sweeps.article.seq_lens.cuda[2]."""
    text = ""
    for key in keys:
        if isinstance(key, str) and _is_word(key):
            text += f".{key}" if text else key
        else:
            text += f"[{_shown(key)}]"
    return text or "the whole"


def _shown(value: Any) -> str:
    """A value as JSON on one line, in ASCII, cut short where it is long."""
    text = json.dumps(value, default=str, skipkeys=True)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_of(values: Iterable[Any]) -> str:
    texts = [value if _is_word(value) else _shown(value) for value in values]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def _instead(name: str, known: list[str], none: str = "none is allowed here") -> str:
    """The names to choose from, and the one that `name` was probably meant to be."""
    if not known:
        return none
    close = get_close_matches(name, known, n=1, cutoff=0.7) if len(known) > 1 else []
    return f"must be {_one_of(known)}" + (f"; did you mean {close[0]}?" if close else "")


def _kind(value: Any) -> str:
    """What a value is, in words, and why it may be that unexpectedly."""
    if value is None:
        return "null (nothing is written below the key)"
    if isinstance(value, bool):
        return "a boolean (YAML reads yes, no, on and off as booleans)"
    if isinstance(value, str):
        why = " (in quotes, or by --config, which makes text of what is in a list or a mapping)"
        return f"text{why if _is_number(value) else ''}"
    if isinstance(value, int):
        return "a number"
    if isinstance(value, float):
        return "a number with a decimal point" if math.isfinite(value) else "infinity or not-a-number"
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+", value, re.ASCII) is not None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _first_line(fault: BaseException) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]
