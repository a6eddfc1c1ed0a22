"""Write the table of keys in config/README.md from the schema; with --check, only say if it differs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from workflow.config import Schema, allowed, load_schema, resolve

README = ROOT / "config" / "README.md"
BEGIN = "<!-- keys: written by workflow/scripts/render_config_readme.py from the schema; do not edit -->"
END = "<!-- end of keys -->"


def render_keys(root: Schema) -> str:
    """The table of every key: what it may be, what it is when left out, what it means."""
    rows = ["| Key | Must be | Default | Meaning |", "| --- | --- | --- | --- |"]
    for key, schema, required in _keys(root, root):
        cells = (f"`{key}`", allowed(schema, root), _default(schema, required), schema["description"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def render_readme(text: str, root: Schema) -> str:
    """The README's text with its table of keys written anew."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"config/README.md must hold both of these lines once:\n{BEGIN}\n{END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render_keys(root)}\n\n{END}{after}"


def _keys(schema: Schema, root: Schema, above: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """(dotted key, schema, whether required) of everything below a schema, in its order."""
    schema = resolve(schema, root)
    below = [
        (key, value, key in schema.get("required", [])) for key, value in schema.get("properties", {}).items()
    ]
    if isinstance(others := schema.get("additionalProperties"), dict):
        below.append(("<name>", others, False))
    for key, value, required in below:
        path = f"{above}{key}"
        yield path, resolve(value, root), required
        yield from _keys(value, root, f"{path}.")


def _default(schema: Schema, required: bool) -> str:
    if "x-default" in schema:
        return str(schema["x-default"])
    if schema.get("default", {}) != {}:
        return f"`{_flow(schema['default'])}`"
    return "required" if required else ""


def _flow(value: Any) -> str:
    """A value as YAML would have it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the table differs"
    )
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    rendered = render_readme(text, load_schema())
    if arguments.check:
        if rendered != text:
            print("config/README.md differs from the schema: run workflow/scripts/render_config_readme.py")
        return int(rendered != text)
    README.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
