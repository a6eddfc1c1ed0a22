"""Imported once by the fork server: what each process would do anew before its first Triton kernel.

Triton keys its cache with a hash over its own files, its library of several hundred megabytes among them.
That took half a second of every process that launched a kernel.
"""

from __future__ import annotations

import contextlib

import triton  # noqa: F401

with contextlib.suppress(ImportError):  # not part of Triton's stated interface: without it, as slow as before
    from triton.runtime.cache import triton_key

    triton_key()
