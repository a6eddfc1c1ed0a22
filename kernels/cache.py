"""A cache of keys and values as plain PyTorch sees it: pages gathered, and which keys a query sees."""

from __future__ import annotations

import torch


def gather_pages(pages: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """A copy of the pages of each sequence in a row.

    pages is (pages, kv_heads, page_size, head_dim) and block_table (batch, pages_per_sequence); returns
    (batch, kv_heads, pages_per_sequence * page_size, head_dim), contiguous. What the table has beyond a
    sequence's last page may be anything: then some page or other is copied.
    """
    count, kv_heads, page_size, head_dim = pages.shape
    batch, per_sequence = block_table.shape
    if not count:
        return pages.new_zeros(batch, kv_heads, per_sequence * page_size, head_dim)
    found = pages[block_table.clamp(0, count - 1)]
    return found.transpose(1, 2).reshape(batch, kv_heads, per_sequence * page_size, head_dim)


def visible_keys(
    seq_lens: torch.Tensor | None, batch: int, queries: int, context: int, device: torch.device
) -> torch.Tensor:
    """(batch, queries, context) bool: query i of L sees keys j < seq_len - (L - 1 - i).

    seq_lens is (batch,), or None where every sequence fills the context.
    """
    keys = torch.arange(context, dtype=torch.int32, device=device)
    later = torch.arange(queries - 1, -1, -1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), context, device=device) if seq_lens is None else seq_lens
    return keys < (lengths[:, None] - later)[:, :, None]
