"""A right flash attention in plain PyTorch, taken apart into the steps that a kernel gets wrong."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
HIDDEN = float("-inf")


class Tiled:
    """softmax(scale * Q K^T) V over tiles of queries and keys, all batches and heads at once.

    Each method is one step; a fault overrides one of them, and says by which `kind` the judge must call it
    and where it shows (`found_by`): in the `grid`, only after `timing`, or only on a `gpu`.
    """

    tile_q = 64
    tile_k = 64
    kind = ""
    found_by = "grid"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        output = self.allocate(q)
        k, v = self.share(k, q.shape[1]), self.share(v, q.shape[1])
        for first in range(0, q.shape[2], self.tile_q):
            rows = torch.arange(first, min(first + self.tile_q, q.shape[2]), device=q.device)
            self.store(output, rows, self.tile(q, k, v, rows, causal, scale).to(output.dtype))
        return output

    def tile(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, causal: bool, scale: float) -> Tensor:
        """The output of these rows, in fp32."""
        queries = self.load(q, rows)
        state = self.start(queries)
        for first in self.visited(rows, k.shape[2], causal):
            columns = torch.arange(first, first + self.tile_k, device=q.device)
            scores = self.scores(queries, self.load(k, columns), scale)
            scores = scores.masked_fill(self.hidden(rows, columns, k.shape[2], causal), HIDDEN)
            state = self.fold(*state, scores, self.load(v, columns), q.dtype)
        _, row_sum, weighted = state
        return self.finish(row_sum, weighted)

    def allocate(self, q: Tensor) -> Tensor:
        return torch.empty_like(q)

    def share(self, tensor: Tensor, heads: int) -> Tensor:
        """K or V with a head for each query head: consecutive query heads share one."""
        group = heads // tensor.shape[1]
        return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)

    def load(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Rows of all heads in fp32; zeros beyond the last one."""
        length = tensor.shape[2]
        tile = tensor[:, :, index.clamp(max=length - 1)].float()
        return tile * (index < length)[:, None]

    def visited(self, rows: Tensor, seq_len_k: int, causal: bool) -> range:
        """Where the tiles of keys begin that these rows see something of."""
        end = min(seq_len_k, int(rows[-1]) + 1) if causal else seq_len_k
        return range(0, end, self.tile_k)

    def scores(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        return queries @ keys.transpose(-1, -2) * scale

    def hidden(self, rows: Tensor, columns: Tensor, seq_len_k: int, causal: bool) -> Tensor:
        """True where a row must not see a key: (rows, columns)."""
        beyond = (columns >= seq_len_k).expand(len(rows), -1)
        return beyond | (columns > rows[:, None]) if causal else beyond

    def start(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The row maximum, the row sum and the weighted sum of V before any key."""
        return queries.new_full((*queries.shape[:3], 1), HIDDEN), queries.new_zeros(()), queries.new_zeros(())

    def fold(
        self,
        maximum: Tensor,
        row_sum: Tensor,
        weighted: Tensor,
        scores: Tensor,
        values: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same three after one more tile of keys."""
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        rescale = torch.exp(maximum - higher)
        row_sum = row_sum * rescale + weights.sum(-1, keepdim=True)
        weighted = weighted * rescale + weights.to(dtype).float() @ values
        return higher, row_sum, weighted

    def finish(self, row_sum: Tensor, weighted: Tensor) -> Tensor:
        return weighted / row_sum

    def store(self, output: Tensor, rows: Tensor, tile: Tensor) -> None:
        output[:, :, rows] = tile
