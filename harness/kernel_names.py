"""The names of a GPU's kernels, for people."""

from __future__ import annotations

import re

# How demanglers write a namespace that has no name: it says nothing, and its brackets are no parameters.
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\}|\b_GLOBAL__N__\w+)::")
_CLOSED_BY = {"<": ">", "(": ")", "[": "]", "{": "}"}
# What an element-wise kernel, which is one template for all operations, is made for: by how PyTorch calls it.
_OPERATION = re.compile(r"\b(\w+Functor|\w+_kernel(?:_cuda|_impl)?)\b")


def short_kernel_name(name: str) -> str:
    """A kernel's name with its namespaces, without template arguments, parameters and return type.

    These fill lines. A lambda or a call operator keeps its place: `scale::[lambda]::operator()`.
    """
    if name.startswith(("Memset", "Memcpy")):
        return name
    plain = _UNNAMED.sub("", name).replace("operator ()", "operator()")
    found, place = "", 0
    while place < len(plain):
        character = plain[place]
        if found.endswith("operator") and plain.startswith("()", place):
            found, place = found + "()", place + 2
            continue
        if character not in _CLOSED_BY:
            found, place = found + character, place + 1
            continue
        end = _end_of_brackets(plain, place)
        if (lambda_ := re.match(r"[\[{]\s*'?(lambda)", plain[place:end])) is not None:
            found += f"[{lambda_[1]}]"
        elif character == "(" and not _goes_on(plain, end):
            break  # the kernel's own parameters: all after them is no name
        place = end
    words = found.replace(" const::", "::").split()
    return words[-1] if words else name


def element_operation(name: str) -> str | None:
    """What a kernel applies to each element, where its template arguments tell, as PyTorch's do; else None.

    Of nested ones the innermost: `MulFunctor` of an `AUnaryFunctor<..., MulFunctor<float>>`.
    """
    plain = _UNNAMED.sub("", name)
    start = plain.find("<")
    if start < 0 or plain.find("(") in range(start):
        return None
    found = _OPERATION.findall(plain[start : _end_of_brackets(plain, start)])
    return found[-1] if found else None


def _end_of_brackets(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`; the end of a text that is cut off."""
    open_ones: list[str] = []
    for place in range(start, len(text)):
        character = text[place]
        if character in _CLOSED_BY:
            open_ones.append(_CLOSED_BY[character])
        elif character == ">" and (open_ones[-1] != ">" or text[place - 1] == "-"):
            continue  # a comparison inside other brackets, or an arrow
        elif character in _CLOSED_BY.values() and character == open_ones[-1]:
            open_ones.pop()
            if not open_ones:
                return place + 1
    return len(text)


def _goes_on(text: str, place: int) -> bool:
    """Whether something is named inside what a function's parameters end: `f(int)::g`, `f() const::g`."""
    return text[place:].removeprefix(" const").startswith("::")
