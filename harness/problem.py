"""The problem a kernel is asked to solve: its shape, its cost and its inputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"fp16": 2, "bf16": 2}
TORCH_DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
# Bits of the mantissa that are stored: the unit in the last place of x is 2^(exponent(x) - bits).
MANTISSA_BITS = {"fp16": 10, "bf16": 7}
SMALLEST_NORMAL_EXPONENT = {"fp16": -14, "bf16": -126}


@dataclass(frozen=True)
class Problem:
    """One attention problem: softmax(scale * Q K^T) V.

    Q and the output are (batch, heads, seq_len_q, head_dim), K and V are
    (batch, kv_heads, seq_len_k, head_dim). A causal mask is aligned to the top left, as
    `scaled_dot_product_attention` does with `is_causal`: query row i sees keys 0 to i.
    Consecutive `heads // kv_heads` query heads share one head of K and V.
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

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_k", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads}: must be a multiple of kv_heads = {self.kv_heads}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype = {self.dtype}: must be one of {', '.join(ITEM_BYTES)}")

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

    @property
    def unmasked_pairs(self) -> int:
        """Number of (query, key) pairs of one head that the mask lets through."""
        if not self.causal:
            return self.seq_len_q * self.seq_len_k
        triangle = min(self.seq_len_q, self.seq_len_k)
        return triangle * (triangle + 1) // 2 + (self.seq_len_q - triangle) * self.seq_len_k

    @property
    def flop_count(self) -> int:
        """Floating-point operations of the two matrix products, masked pairs left out.

        Two products, a multiplication and an addition each: 4 * batch * heads * pairs * head_dim,
        as FlashAttention's authors count them.
        """
        return 4 * self.batch * self.heads * self.unmasked_pairs * self.head_dim

    @property
    def input_bytes(self) -> int:
        """Bytes of Q, K and V."""
        query = self.batch * self.heads * self.seq_len_q * self.head_dim
        key = self.batch * self.kv_heads * self.seq_len_k * self.head_dim
        return (query + 2 * key) * ITEM_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.batch * self.heads * self.seq_len_q * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def minimal_bytes(self) -> int:
        """The fewest bytes a kernel can move: each input read once, the output written once."""
        return self.input_bytes + self.output_bytes

    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, TORCH_DTYPE_NAMES[self.dtype])
        return dtype


PROBLEM_FIELDS = tuple(field.name for field in fields(Problem))
