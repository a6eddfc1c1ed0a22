"""Digests of source code that change when the code changes, and not when its text does.

A digest covers a file and every file of the same checkout that it imports, directly or not. It is
taken over the syntax tree without docstrings, so comments, docstrings and white space are no change. The
same code has the same digest under every Python that can parse it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def source_digest(path: Path, root: Path) -> str:
    """A short digest of the file and its import closure within `root`.

    Imports made by a name computed at run time are not followed, nor those under
    `if TYPE_CHECKING:`, which never run. Raises SyntaxError for a file that does not parse.
    """
    root = root.resolve()
    hasher = hashlib.sha256()
    for file in sorted(import_closure(path, root)):
        hasher.update(f"{file.relative_to(root)}\n{_source(file, root).meaning}\n".encode())
    return hasher.hexdigest()[:16]


def import_closure(path: Path, root: Path) -> set[Path]:
    """The file and all files under `root` that it imports, directly or through others."""
    root = root.resolve()
    found: set[Path] = set()
    waiting = [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for module in _source(file, root).imports:
            waiting.extend(_module_files(module, root))
    return found


@dataclass(frozen=True)
class _Source:
    """What a digest needs of a file: its syntax tree without docstrings, as text, and its imports."""

    meaning: str
    imports: tuple[str, ...]


def _source(file: Path, root: Path) -> _Source:
    state = file.stat()
    return _read(file, root, state.st_mtime_ns, state.st_size)


@functools.cache  # most files stand in the closure of several scripts
def _read(file: Path, root: Path, modified_ns: int, size: int) -> _Source:
    tree = _parse(file)
    imports = tuple(_imported_modules(tree, file, root))
    return _Source(_dump(_without_docstrings(tree)), imports)


def _dump(value: object) -> str:
    """The tree as text. `ast.dump` says other things in other Pythons: fields come, and empty ones go."""
    if isinstance(value, ast.JoinedStr):
        return f"JoinedStr({_dump(_joined(value))})"
    if isinstance(value, ast.AST):
        fields = ((name, _dump(field)) for name, field in ast.iter_fields(value))
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in fields if text)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]" if value else ""
    return "" if value is None else repr(value)


def _joined(string: ast.JoinedStr) -> list[object]:
    """The parts of an f-string, its text in one piece between values: Python 3.12 cuts it up otherwise."""
    parts: list[object] = []
    for part in string.values:
        if not isinstance(part, ast.Constant):
            parts.append(part)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += str(part.value)
        elif part.value:
            parts.append(part.value)
    return parts


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if not isinstance(node, documented) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            node.body = node.body[1:]
    return tree


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, except the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _running_nodes(other)
            continue
        yield child
        yield from _running_nodes(child)


def _imported_modules(tree: ast.Module, file: Path, root: Path) -> Iterator[str]:
    package = file.parent.relative_to(root).parts
    for node in _running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            if prefix:
                yield prefix
            # `from package import name` may name a module of the package.
            yield from (f"{prefix}.{alias.name}" if prefix else alias.name for alias in node.names)


def _module_files(module: str, root: Path) -> Iterator[Path]:
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        for candidate in (folder.with_name(folder.name + ".py"), folder / "__init__.py"):
            if candidate.is_file():
                yield candidate


def defines_function(path: Path, name: str) -> bool:
    """Whether the file defines a function of that name at its top level; the file is not imported."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in _parse(path).body)
