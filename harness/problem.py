"""The problem a kernel is asked to solve: its shape, its cost and its inputs."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"fp16": 2, "bf16": 2}
TORCH_DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
# Bits of the mantissa that are stored: the unit in the last place of x is 2^(exponent(x) - bits).
MANTISSA_BITS = {"fp16": 10, "bf16": 7}
SMALLEST_NORMAL_EXPONENT = {"fp16": -14, "bf16": -126}
INDEX_BYTES = 4  # of an entry of `seq_lens` and of a block table

# A workload is answered by a kernel's function of the same name.
ATTENTION = "attention"
DECODE = "decode"
WORKLOADS = (ATTENTION, DECODE)
EQUAL = "equal"
UNEVEN = "uneven"
SOME_EMPTY = "some_empty"
LENGTHS = (EQUAL, UNEVEN, SOME_EMPTY)


@dataclass(frozen=True)
class Problem:
    """One attention problem: softmax(scale * Q K^T) V.

    Q and the output are (batch, heads, seq_len_q, head_dim), K and V are
    (batch, kv_heads, seq_len_k, head_dim). A causal mask is aligned to the top left, as
    `scaled_dot_product_attention` does with `is_causal`: query row i sees keys 0 to i.
    Consecutive `heads // kv_heads` query heads share one head of K and V.

    In the workload `decode` K and V are a cache with room for seq_len_k tokens (the context), and the
    seq_len_q queries of a sequence are its newest tokens, whose keys are in the cache: the mask is always
    causal and aligned to the bottom right. `lengths` says how many tokens of the cache each sequence
    has: all of them (`equal`), from a share to all (`uneven`), or from none to all (`some_empty`). With a
    `page_size` above 0 the cache lies in pages of so many tokens, found through a block table.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_len_q: int
    seq_len_k: int
    head_dim: int
    causal: bool
    dtype: str
    seed: int = 0
    workload: str = ATTENTION
    lengths: str = EQUAL
    page_size: int = 0

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_k", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads}: must be a multiple of kv_heads = {self.kv_heads}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype = {self.dtype}: must be one of {', '.join(ITEM_BYTES)}")
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload = {self.workload}: must be one of {', '.join(WORKLOADS)}")
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths = {self.lengths}: must be one of {', '.join(LENGTHS)}")
        if self.page_size < 0:
            raise ValueError(f"page_size = {self.page_size}: must be at least 0")
        if self.workload == DECODE and not self.causal:
            raise ValueError("causal = False: a decode problem's mask is causal, aligned to the bottom right")
        if self.workload == ATTENTION and (self.lengths != EQUAL or self.page_size):
            raise ValueError("lengths and page_size are of decode problems only")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Problem:
        """Build a problem from a spec's JSON object; an unknown key is a TypeError."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def scale(self) -> float:
        """The factor on the scores: 1 / sqrt(head_dim), SDPA's default."""
        return float(self.head_dim**-0.5)

    @cached_property
    def sequence_lengths(self) -> tuple[int, ...]:
        """How many keys each sequence of the batch has.

        Uneven ones rise in equal steps to seq_len_k, the longest, and are then shuffled by the seed.
        """
        if self.lengths == EQUAL:
            return (self.seq_len_k,) * self.batch
        first = 0 if self.lengths == SOME_EMPTY else 1
        steps = max(1, self.batch - 1 + first)
        lengths = [-(-self.seq_len_k * (index + first) // steps) for index in range(self.batch)]
        random.Random(self.seed).shuffle(lengths)
        return tuple(lengths)

    @property
    def unmasked_pairs(self) -> int:
        """Number of (query, key) pairs of one head, over all sequences, that the mask lets through."""
        if self.workload == DECODE:
            return sum(
                max(0, length - later) for length in self.sequence_lengths for later in range(self.seq_len_q)
            )
        if not self.causal:
            return self.batch * self.seq_len_q * self.seq_len_k
        triangle = min(self.seq_len_q, self.seq_len_k)
        pairs = triangle * (triangle + 1) // 2 + (self.seq_len_q - triangle) * self.seq_len_k
        return self.batch * pairs

    @property
    def flop_count(self) -> int:
        """Floating-point operations of the two matrix products, masked pairs left out.

        Two products, a multiplication and an addition each: 4 * heads * pairs * head_dim, the pairs
        counted over the batch, as FlashAttention's authors count them.
        """
        return 4 * self.heads * self.unmasked_pairs * self.head_dim

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the block table; 0 where the cache is not paged."""
        return -(-self.seq_len_k // self.page_size) if self.page_size else 0

    @property
    def states_lengths(self) -> bool:
        """Whether a kernel is told each sequence's length; otherwise the cache's own says it."""
        return self.lengths != EQUAL or self.pages_per_sequence * self.page_size > self.seq_len_k

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape of K and of V: (batch, kv_heads, seq_len_k, head_dim), or of all pages."""
        if self.page_size:
            return (self.batch * self.pages_per_sequence, self.kv_heads, self.page_size, self.head_dim)
        return (self.batch, self.kv_heads, self.seq_len_k, self.head_dim)

    @property
    def input_bytes(self) -> int:
        """Bytes of Q, K and V, of the lengths and of the block table, as they are allocated."""
        query = self.batch * self.heads * self.seq_len_q * self.head_dim
        first, heads, length, head_dim = self.key_shape
        indices = self.batch * (self.states_lengths + self.pages_per_sequence)
        elements = query + 2 * first * heads * length * head_dim
        return elements * ITEM_BYTES[self.dtype] + indices * INDEX_BYTES

    @property
    def key_value_bytes(self) -> int:
        """Bytes of K and V that belong to the sequences: the cache's unused room left out."""
        return 2 * sum(self.sequence_lengths) * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.batch * self.heads * self.seq_len_q * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def minimal_bytes(self) -> int:
        """The fewest bytes a kernel can move: Q, and what it needs of K and V, read, the output written.

        Lengths and block table are not counted.
        """
        return 2 * self.output_bytes + self.key_value_bytes

    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, TORCH_DTYPE_NAMES[self.dtype])
        return dtype


PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))
