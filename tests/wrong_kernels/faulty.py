"""A plug-in whose option `fault` chooses what is wrong: each class gets one step of `Tiled` wrong.

`kind` is the key of FAULT_KINDS by which the judge must call it.
"""

from __future__ import annotations

from collections import Counter

import torch

from tests.wrong_kernels.tiled import HIDDEN, Tensor, Tiled

LOG2_E = 1.4426950408889634


# --- the mask


class MaskOffByOne(Tiled):
    kind = "inaccurate"

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows + 1, columns, seq_len_k, causal)

    def visited(self, rows, seq_len_k, causal):
        return super().visited(rows + 1, seq_len_k, causal)


class MaskHidesTheDiagonal(Tiled):
    kind = "inaccurate"

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden((rows - 1).clamp(min=0), columns, seq_len_k, causal)


class MaskIgnored(Tiled):
    kind = "inaccurate"

    def tile(self, q, k, v, rows, causal, scale):
        return super().tile(q, k, v, rows, False, scale)


class MaskOnlyInTheLastTile(Tiled):
    """A tile of queries is as wide as two tiles of keys: two of them cross the diagonal."""

    kind = "inaccurate"
    tile_q = 128

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows, columns, seq_len_k, causal and bool(columns[-1] >= rows[-1]))


class AlignedToTheBottomRight(Tiled):
    kind = "inaccurate"

    def tile(self, q, k, v, rows, causal, scale):
        self.shift = max(0, k.shape[2] - q.shape[2])
        return super().tile(q, k, v, rows, causal, scale)

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows + self.shift, columns, seq_len_k, causal)

    def visited(self, rows, seq_len_k, causal):
        return super().visited(rows + self.shift, seq_len_k, causal)


class CausalOneTileTooFew(Tiled):
    kind = "inaccurate"

    def visited(self, rows, seq_len_k, causal):
        tiles = super().visited(rows, seq_len_k, causal)
        return tiles[: max(1, len(tiles) - 1)] if causal else tiles


class CausalOneTileTooMany(Tiled):
    """The tile behind the diagonal is visited, and taken for one that needs no mask."""

    kind = "inaccurate"

    def visited(self, rows, seq_len_k, causal):
        return super().visited(rows + self.tile_k, seq_len_k, causal)

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows, columns, seq_len_k, causal and bool(columns[0] <= rows[-1]))


class TailNotMasked(Tiled):
    """The zeros behind the last key count as keys."""

    kind = "inaccurate"

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows, columns, seq_len_k + self.tile_k, causal)


# --- which keys


class LastTileDropped(Tiled):
    """The number of tiles is rounded down."""

    kind = "inaccurate"

    def visited(self, rows, seq_len_k, causal):
        return super().visited(rows, max(self.tile_k, seq_len_k // self.tile_k * self.tile_k), causal)


class FirstKeySkipped(Tiled):
    kind = "inaccurate"

    def hidden(self, rows, columns, seq_len_k, causal):
        first = (columns == 0) & (rows[:, None] > 0)
        return super().hidden(rows, columns, seq_len_k, causal) | first


class LastKeySkippedInATail(Tiled):
    kind = "inaccurate"

    def hidden(self, rows, columns, seq_len_k, causal):
        return super().hidden(rows, columns, seq_len_k - bool(seq_len_k % self.tile_k), causal)


class ValuesOfTheTileBefore(Tiled):
    """The buffer for V is read before the copy into it has ended."""

    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        last = values if row_sum.dim() == 0 else self.last
        self.last = values
        return super().fold(maximum, row_sum, weighted, scores, last, dtype)


# --- the softmax


class AccumulatorNotRescaled(Tiled):
    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        higher, row_sum, scaled = super().fold(maximum, row_sum, weighted, scores, values, dtype)
        return higher, row_sum, scaled - weighted * torch.exp(maximum - higher) + weighted


class RowSumNotRescaled(Tiled):
    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        higher, scaled, weighted = super().fold(maximum, row_sum, weighted, scores, values, dtype)
        return higher, scaled - row_sum * torch.exp(maximum - higher) + row_sum, weighted


class MaximumNotCarried(Tiled):
    """What came before is rescaled from minus infinity: lost."""

    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        _, row_sum, weighted = super().fold(maximum, row_sum, weighted, scores, values, dtype)
        return maximum, row_sum, weighted


class NoMaximumSubtracted(Tiled):
    """Right for the scores of standard normal values, and infinite for large ones."""

    kind = "not_finite"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        weights = torch.exp(scores)
        return maximum, row_sum + weights.sum(-1, keepdim=True), weighted + weights @ values


class MaximumOfTheFirstTile(Tiled):
    """Right while no later score is far above those of the first tile: weights overflow fp16."""

    kind = "not_finite"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        kept = scores.amax(-1, keepdim=True) if row_sum.dim() == 0 else maximum
        weights = torch.exp(scores - kept).to(dtype).float()
        return kept, row_sum + weights.sum(-1, keepdim=True), weighted + weights @ values


class NotNormalised(Tiled):
    kind = "inaccurate"

    def finish(self, row_sum, weighted):
        return weighted


class NormalisedInEachTile(Tiled):
    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        _, tile_sum, tile = super().fold(*self.start(scores), scores, values, dtype)
        return maximum, row_sum + 1, weighted + tile / tile_sum


class BaseTwoWithoutLog2E(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries, keys, scale) / LOG2_E


class RescaledInAnotherBase(Tiled):
    """Weights are powers of e, what rescales is a power of two."""

    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        wrong = torch.exp2(maximum - higher) / torch.exp(maximum - higher).clamp(min=1e-30)
        return super().fold(maximum, row_sum * wrong, weighted * wrong, scores, values, dtype)


class ScaleIgnored(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries, keys, 1.0)


class ScaleAppliedTwice(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries, keys, scale * scale)


class ScaleOfHeadDim64(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries, keys, 0.125)


# --- precision


class HalfPrecisionAccumulator(Tiled):
    """Key after key is added to a sum of the inputs' dtype."""

    kind = "inaccurate"
    tile_q = 4096
    tile_k = 4

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        higher, row_sum, weighted = super().fold(maximum, row_sum, weighted, scores, values, dtype)
        return higher, row_sum, weighted.to(dtype).float()


class HalfPrecisionRowSum(Tiled):
    kind = "inaccurate"
    tile_q = 4096
    tile_k = 4

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        higher, row_sum, weighted = super().fold(maximum, row_sum, weighted, scores, values, dtype)
        return higher, row_sum.to(dtype).float(), weighted


class EightBitWeights(Tiled):
    kind = "inaccurate"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        return super().fold(maximum, row_sum, weighted, scores, values, torch.float8_e4m3fn)


class TruncatedMantissa(Tiled):
    """The products' operands lose the low bits of their mantissa, as on cheaper units of a GPU."""

    kind = "inaccurate"

    def load(self, tensor, index):
        bits = super().load(tensor, index).view(torch.int32)
        return (bits & -(1 << 18)).view(torch.float32)


class EightBitScores(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries, keys, scale).to(torch.float8_e5m2).float()


# --- addresses


class BatchStrideIgnored(Tiled):
    kind = "inaccurate"

    def share(self, tensor, heads):
        shared = super().share(tensor, heads)
        return shared[:1].expand_as(shared)


class HeadStrideIgnored(Tiled):
    kind = "inaccurate"

    def share(self, tensor, heads):
        shared = super().share(tensor, heads)
        return shared[:, :1].expand_as(shared)


class SharedHeadsInAnotherOrder(Tiled):
    kind = "inaccurate"

    def share(self, tensor, heads):
        return tensor.repeat(1, heads // tensor.shape[1], 1, 1)


class OffsetOverflows(Tiled):
    """Offsets wrap, here beyond 2^15 elements instead of 2^31."""

    kind = "inaccurate"

    def load(self, tensor, index):
        batch, heads, length, width = tensor.shape
        if tensor.numel() <= 1 << 15:
            return super().load(tensor, index)
        head = torch.arange(batch * heads, device=tensor.device).view(batch, heads, 1, 1)
        row = index.clamp(max=length - 1)[:, None]
        offsets = (head * length + row) * width + torch.arange(width, device=tensor.device)
        tile = tensor.reshape(-1)[offsets % (1 << 15)].float()
        return tile * (index < length)[:, None]


class HeadDimCutTo64(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return super().scores(queries[..., :64], keys[..., :64], scale)


class HeadsSwappedInOneTile(Tiled):
    kind = "inaccurate"

    def store(self, output, rows, tile):
        super().store(output, rows, tile.flip(1) if int(rows[0]) == self.tile_q else tile)


class OutputInAnotherLayout(Tiled):
    """Written as (batch, seq_len, heads, head_dim), read as (batch, heads, seq_len, head_dim)."""

    kind = "inaccurate"

    def __call__(self, q, k, v, causal, scale):
        output = super().__call__(q, k, v, causal, scale)
        return output.transpose(1, 2).contiguous().view(output.shape)


class ReadsPastTheEnd(Tiled):
    """The rows behind the last one are loaded, with a weight of zero."""

    kind = "not_finite"

    def load(self, tensor, index):
        if tensor.untyped_storage().nbytes() == tensor.nbytes:  # a copy, with nothing around it
            return super().load(tensor, index)
        batch, heads, length, width = tensor.shape
        longer = tensor.as_strided(
            (batch, heads, length + 4, width), tensor.stride(), tensor.storage_offset()
        )
        return longer[:, :, index.clamp(max=length + 3)].float()


class WritesPastTheEnd(Tiled):
    kind = "wrote_outside"

    def store(self, output, rows, tile):
        super().store(output, rows, tile)
        output.as_strided((1,), (1,), output.storage_offset() + output.numel()).fill_(1.0)


# --- the output


class SinglePrecisionOutput(Tiled):
    kind = "form"

    def allocate(self, q):
        return torch.empty_like(q, dtype=torch.float32)


class TransposedOutput(Tiled):
    kind = "form"

    def __call__(self, q, k, v, causal, scale):
        return super().__call__(q, k, v, causal, scale).transpose(1, 2)


class ReturnsStatisticsToo(Tiled):
    kind = "form"

    def __call__(self, q, k, v, causal, scale):
        return super().__call__(q, k, v, causal, scale), None


class NanInOneRowBeyond512(Tiled):
    kind = "not_finite"

    def store(self, output, rows, tile):
        super().store(output, rows, tile)
        output[:1, :1, rows[(rows == 700)]] = float("nan")


class WrongBeyond1024(Tiled):
    """One row in a thousand, slightly, and only in long sequences."""

    kind = "inaccurate"

    def store(self, output, rows, tile):
        super().store(output, rows, torch.where(rows[:, None] == 1026, tile * 1.25, tile))


class Zeros(Tiled):
    kind = "inaccurate"

    def store(self, output, rows, tile):
        super().store(output, rows, torch.zeros_like(tile))


class ZerosInTheLastRow(Tiled):
    """Where outputs are small an absolute tolerance alone takes zeros for right."""

    kind = "inaccurate"

    def store(self, output, rows, tile):
        super().store(output, rows, torch.where(rows[:, None] == output.shape[2] - 1, 0 * tile, tile))


class MeanOfValues(Tiled):
    kind = "inaccurate"

    def scores(self, queries, keys, scale):
        return 0 * super().scores(queries, keys, scale)


class LastRowsNotWritten(Tiled):
    kind = "uninitialised"

    def store(self, output, rows, tile):
        written = rows < output.shape[2] - 3
        super().store(output, rows[written], tile[:, :, written])


class MaximumNotInitialised(Tiled):
    """NaN in fresh memory is passed over by fmax, so that the first call is right."""

    kind = "uninitialised"

    def start(self, queries):
        _, row_sum, weighted = super().start(queries)
        scratch = torch.empty((*queries.shape[:3], 1), device=queries.device)
        return torch.fmax(scratch, torch.full_like(scratch, HIDDEN)), row_sum, weighted


# --- the caller's data, and what is left from the call before


class ChangesQ(Tiled):
    kind = "inputs_changed"

    def __call__(self, q, k, v, causal, scale):
        return super().__call__(q.mul_(0.5), k, v, causal, 2 * scale)


class ChangesKForGood(Tiled):
    kind = "inputs_changed"

    def __call__(self, q, k, v, causal, scale):
        output = super().__call__(q, k, v, causal, scale)
        k[:, :, -1] = 0
        return output


class CachedByAddress(Tiled):
    kind = "stale_output"

    def __init__(self) -> None:
        self.cache: dict[object, Tensor] = {}

    def key(self, q: Tensor, causal: bool) -> object:
        return (q.data_ptr(), q.shape, q.dtype, causal)

    def __call__(self, q, k, v, causal, scale):
        key = self.key(q, causal)
        if key not in self.cache:
            self.cache = {key: super().__call__(q, k, v, causal, scale)}
        return self.cache[key]


class CachedByShape(CachedByAddress):
    kind = "stale_output"

    def key(self, q, causal):
        return (q.shape, q.dtype, causal)


class RightOnlyTwice(Tiled):
    kind = "inaccurate"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q, k, v, causal, scale):
        self.calls += 1
        return super().__call__(q, k, v, causal, scale if self.calls <= 2 else 0.9 * scale)


class RightOnlyOnce(RightOnlyTwice):
    kind = "not_deterministic"

    def __init__(self) -> None:
        self.calls = 1


class SharedOutput(Tiled):
    kind = "overwrote_output"

    def __init__(self) -> None:
        self.outputs: dict[object, Tensor] = {}

    def allocate(self, q):
        return self.outputs.setdefault((q.shape, q.dtype), torch.empty_like(q))


class Noise(Tiled):
    """As dropout that was left on, but smaller than any tolerance."""

    kind = "not_deterministic"

    def finish(self, row_sum, weighted):
        output = super().finish(row_sum, weighted)
        return output * (1 + 1e-4 * torch.randn_like(output))


class KeysInAnyOrder(Tiled):
    """As sums by atomic additions: each time in another order."""

    kind = "not_deterministic"

    def fold(self, maximum, row_sum, weighted, scores, values, dtype):
        state = (maximum, row_sum, weighted)
        for part in torch.randperm(self.tile_k, device=scores.device).chunk(2):
            state = super().fold(*state, scores[..., part], values[:, :, part], dtype)
        return state

    def start(self, queries):
        maximum, row_sum, weighted = super().start(queries)
        return torch.full_like(maximum, -100.0), row_sum, weighted  # a part may see nothing


# --- what three calls of a cell do not show


class RightOnlyFiveTimes(Tiled):
    kind = "inaccurate"
    found_by = "timing"

    def __init__(self) -> None:
        self.calls: Counter[object] = Counter()

    def __call__(self, q, k, v, causal, scale):
        self.calls[q.shape, q.dtype, causal] += 1
        right = self.calls[q.shape, q.dtype, causal] <= 5
        return super().__call__(q, k, v, causal, scale if right else 0.9 * scale)


class CachedAfterFiveCalls(RightOnlyFiveTimes):
    """It has learned that it is being timed."""

    kind = "stale_output"

    def __call__(self, q, k, v, causal, scale):
        if self.calls[q.shape, q.dtype, causal] >= 5:
            return self.last
        self.last = super().__call__(q, k, v, causal, scale)
        return self.last


class ChangesVAfterFiveCalls(RightOnlyFiveTimes):
    kind = "inputs_changed"

    def __call__(self, q, k, v, causal, scale):
        output = Tiled.__call__(self, q, k, v, causal, scale)
        self.calls[q.shape, q.dtype, causal] += 1
        if self.calls[q.shape, q.dtype, causal] > 5:
            v[:, :, 0] += 1
        return output


# --- streams


class WorksOnAnotherStream(Tiled):
    """The caller's stream does not wait for it."""

    kind = "asynchronous"
    found_by = "gpu"

    def __call__(self, q, k, v, causal, scale):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return torch.nn.functional.scaled_dot_product_attention(
                q, self.share(k, q.shape[1]), self.share(v, q.shape[1]), is_causal=causal, scale=scale
            )


class DoesNotWaitForItsInputs(Tiled):
    kind = "asynchronous"
    found_by = "gpu"

    def __call__(self, q, k, v, causal, scale):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            output = super().__call__(q, k, v, causal, scale)
        torch.cuda.current_stream().wait_stream(stream)
        return output


FAULTS = {
    name: found
    for name, found in list(globals().items())
    if isinstance(found, type) and issubclass(found, Tiled) and found is not Tiled
}
_kernels: dict[str, Tiled] = {}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, fault: str | None = None
) -> Tensor:
    """softmax(scale * Q K^T) V with the fault of that name, or right."""
    if fault not in _kernels:
        _kernels[fault] = FAULTS[fault]() if fault else Tiled()
    return _kernels[fault](q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)


def forget() -> None:
    """Begin anew, as a fresh process does: what kernels kept between calls is gone."""
    _kernels.clear()
