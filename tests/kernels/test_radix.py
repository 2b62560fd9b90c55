"""Radix selection against sorting and direct counts. ``T`` tokens, ``E`` experts."""

import struct
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.kernels import from_key, pair_counts, radix_counts, select_rank, target_rank, to_key

QUICK = settings.get_profile("kernels")
PASSES = {torch.bfloat16: 2, torch.float32: 4}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
NAN_BITS = {torch.bfloat16: [0x7FC0, 0x7F81, -0x40, -1], torch.float32: [0x7FC00000, 0x7F800001, -0x400000, -1]}

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
floats = st.floats(width=32, allow_nan=False)


def every_bf16() -> Tensor:
    """All bf16 values but NaN, rising; -0.0 just before +0.0."""
    bits = torch.arange(1 << 16).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[~values.isnan()]
    negative = values[values.signbit()].flip(0)
    return torch.cat([negative, values[~values.signbit()]])


def direct_counts(values: Tensor, prefix: Tensor | None, byte: int) -> Tensor:
    """Count the keys themselves, expert by expert."""
    below = 8 * (PASSES[values.dtype] - byte - 1)
    counts = torch.zeros(values.shape[1], 256, dtype=torch.int32)
    for expert in range(values.shape[1]):
        keys = to_key(values[:, expert]) >> below
        if prefix is not None:
            keys = keys[keys >> 8 == prefix[expert]]
        counts[expert] = torch.bincount(keys & 255, minlength=256)
    return counts


def radix_select(shards: list[Tensor], rank: Tensor) -> Tensor:
    """The value of rank ``rank [E]`` in every column of all shards together, fp32."""
    prefix = None
    dtype = shards[0].dtype
    for byte in range(PASSES[dtype]):
        counts = torch.stack([radix_counts(shard, prefix, byte) for shard in shards]).long().sum(0)
        prefix, rank = select_rank(counts, prefix, rank)
    assert prefix is not None
    return from_key(prefix, dtype)


def bf16_or_fp32(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(dtype)


# keys


def test_keys_of_all_bf16_values_rise() -> None:
    values = every_bf16()
    keys = to_key(values)
    assert len(values) == (1 << 16) - 2 * 127
    assert keys.dtype == torch.int64
    # one step is no step: from -0.0 to +0.0
    assert (keys.diff() >= 0).all()
    assert (keys.diff() == 0).sum() == 1
    assert torch.equal(keys.diff() > 0, values.double().diff() > 0)
    assert keys.min() >= 0
    assert keys.max() < 1 << 16


def test_from_key_gives_all_bf16_values_back() -> None:
    values = every_bf16()
    assert from_key(to_key(values), torch.bfloat16).dtype == torch.float32
    assert from_key(to_key(values), torch.bfloat16).equal(values.float())
    assert to_key(from_key(to_key(values), torch.bfloat16).bfloat16()).equal(to_key(values))


def key_of(value: float) -> int:
    """The definition, on the bits of one fp32 number."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value + 0.0))
    return bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000


@QUICK
@given(st.lists(floats, min_size=1, max_size=50))
def test_fp32_keys_follow_the_definition(values: list[float]) -> None:
    assert to_key(torch.tensor(values)).tolist() == [key_of(value) for value in values]


@every_dtype
@QUICK
@given(left=floats, right=floats)
def test_keys_have_the_order_of_the_values(dtype: torch.dtype, left: float, right: float) -> None:
    pair = bf16_or_fp32([left, right], dtype)
    first, second = to_key(pair).tolist()
    assert (first < second) == (pair[0].item() < pair[1].item())
    assert (first == second) == (pair[0].item() == pair[1].item())
    assert from_key(to_key(pair), dtype).equal(pair.float())


@every_dtype
def test_keys_at_the_ends(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = torch.tensor(1).to(BITS[dtype]).view(dtype).item()
    rising = [float("-inf"), info.min, -1.0, -info.tiny, -smallest, 0.0, smallest, info.tiny, 1.0, info.max]
    values = torch.tensor([*rising, float("inf")], dtype=dtype)
    keys = to_key(values)
    assert (keys.diff() > 0).all()
    assert keys[5] == 1 << (8 * PASSES[dtype] - 1)
    assert to_key(-values[5:6]) == keys[5]
    assert from_key(to_key(torch.tensor([-0.0], dtype=dtype)), dtype).signbit().tolist() == [False]
    assert from_key(keys, dtype).equal(values.float())


@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 3, 4)])
def test_keys_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    assert to_key(values).shape == shape
    assert from_key(to_key(values), dtype).equal(values.float())


@every_dtype
def test_nothing_counted_gives_nan(dtype: torch.dtype) -> None:
    empty = torch.zeros(0, 3, dtype=dtype)
    assert radix_select([empty], torch.zeros(3, dtype=torch.int64)).isnan().all()


# NaN


@every_dtype
@pytest.mark.parametrize("which", range(4))
def test_nan_is_refused(which: int, dtype: torch.dtype) -> None:
    values = torch.randn(5000, 7).to(dtype)
    values.view(BITS[dtype])[4987, 3] = NAN_BITS[dtype][which]
    assert values.isnan().sum() == 1
    with pytest.raises(ValueError, match="NaN"):
        to_key(values)
    with pytest.raises(ValueError, match="NaN"):
        radix_counts(values, None, 0)


@every_dtype
@pytest.mark.parametrize("which", range(4))
def test_nan_is_refused_under_a_prefix(which: int, dtype: torch.dtype) -> None:
    values = torch.randn(5000, 7).to(dtype)
    values.view(BITS[dtype])[4987, 3] = NAN_BITS[dtype][which]
    prefix = torch.full((7,), 0 if NAN_BITS[dtype][which] < 0 else 255)
    with pytest.raises(ValueError, match="NaN"):
        radix_counts(values, prefix, 1)


@every_dtype
def test_infinities_are_numbers(dtype: torch.dtype) -> None:
    values = torch.tensor([[float("inf")], [float("-inf")], [1.0], [float("inf")]], dtype=dtype)
    assert radix_counts(values, None, 0).sum() == 4
    selected = [radix_select([values], torch.tensor([rank])).item() for rank in (1, 2, 3, 4)]
    assert selected == [float("-inf"), 1.0, float("inf"), float("inf")]


# counts


def mixed_values(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Columns of small range, so that every prefix of the middle one holds many values; both signs and zeros."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    values = torch.randn(num_tokens, num_experts, generator=generator) * torch.tensor(10.0).pow(
        torch.arange(num_experts) % 5 - 2
    )
    values[::5] = 0.0
    values[1::7] = -0.0
    values[2::11] = 0.3710938
    values[3::13] = -0.3710938
    return values.to(dtype)


def middle_prefix(values: Tensor, byte: int, sign: str) -> Tensor | None:
    """The first bytes of one key of every column: of a negative, a positive or any value."""
    if byte == 0:
        return None
    ranked = values.sort(0).values
    share = {"negative": 0.25, "positive": 0.8, "mixed": 0.5}[sign]
    rows = torch.full((values.shape[1],), int(len(values) * share))
    if sign == "mixed":
        rows = torch.arange(values.shape[1]) * (len(values) - 1) // max(values.shape[1] - 1, 1)
    return to_key(ranked.gather(0, rows[None])[0]) >> (8 * (PASSES[values.dtype] - byte))


@pytest.mark.parametrize("sign", ["negative", "positive", "mixed"])
@pytest.mark.parametrize(("dtype", "byte"), [(dtype, byte) for dtype in PASSES for byte in range(PASSES[dtype])])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 1), (33, 7), (2049, 5), (4500, 3)])
def test_counts(num_tokens: int, num_experts: int, dtype: torch.dtype, byte: int, sign: str) -> None:
    values = mixed_values(num_tokens, num_experts, dtype)
    prefix = middle_prefix(values, byte, sign)
    counts = radix_counts(values, prefix, byte)
    assert counts.dtype == torch.int32
    assert torch.equal(counts, direct_counts(values, prefix, byte))
    # the prefix is that of a value, so something is there to be counted
    assert (counts.sum(-1) > 0).all()


@every_dtype
def test_prefix_that_no_value_has(dtype: torch.dtype) -> None:
    values = torch.rand(33, 4).to(dtype) + 1
    counts = radix_counts(values, torch.tensor([0, 127, 128, 255]), 1)
    assert counts.shape == (4, 256)
    assert counts.sum() == 0


@every_dtype
@pytest.mark.parametrize("num_experts", [1, 7])
def test_counts_of_no_token(num_experts: int, dtype: torch.dtype) -> None:
    values = torch.zeros(0, num_experts, dtype=dtype)
    for byte in range(PASSES[dtype]):
        prefix = None if byte == 0 else torch.zeros(num_experts, dtype=torch.int64)
        assert torch.equal(radix_counts(values, prefix, byte), torch.zeros(num_experts, 256, dtype=torch.int32))


def transposed(values: Tensor) -> Tensor:
    return values.t().contiguous().t()


def columns_of_a_larger_buffer(values: Tensor) -> Tensor:
    buffer = torch.full((len(values) + 3, values.shape[1] + 5), float("nan"), dtype=values.dtype)
    view = buffer[1:-2, 2:-3]
    view.copy_(values)
    return view


def rows_of_a_larger_buffer(values: Tensor) -> Tensor:
    # as the margins of a step are kept: filled up to here
    buffer = torch.full((len(values) + 100, values.shape[1]), float("nan"), dtype=values.dtype)
    buffer[: len(values)] = values
    return buffer[: len(values)]


def every_second_column(values: Tensor) -> Tensor:
    return torch.stack([values, torch.full_like(values, float("nan"))], -1).flatten(1)[:, ::2]


def one_row_expanded(values: Tensor) -> Tensor:
    return values[:1].expand(values.shape)


def one_column_expanded(values: Tensor) -> Tensor:
    return values[:, :1].expand(values.shape)


@every_dtype
@pytest.mark.parametrize("num_tokens", [1, 7, 2050])
@pytest.mark.parametrize(
    "view",
    [
        transposed,
        columns_of_a_larger_buffer,
        rows_of_a_larger_buffer,
        every_second_column,
        one_row_expanded,
        one_column_expanded,
    ],
)
def test_counts_of_a_view(view: Callable[[Tensor], Tensor], num_tokens: int, dtype: torch.dtype) -> None:
    viewed = view(mixed_values(num_tokens, 7, dtype))
    for byte in range(PASSES[dtype]):
        prefix = middle_prefix(viewed.contiguous(), byte, "mixed")
        assert torch.equal(radix_counts(viewed, prefix, byte), direct_counts(viewed, prefix, byte))


def test_counting_leaves_the_values_alone() -> None:
    values = mixed_values(300, 7, torch.float32)
    before = values.view(torch.int32).clone()
    radix_counts(values, None, 0)
    radix_counts(values, middle_prefix(values, 1, "mixed"), 1)
    assert torch.equal(values.view(torch.int32), before)


@every_dtype
@QUICK
@given(data=st.data())
def test_counts_of_the_parts_sum_to_those_of_the_whole(dtype: torch.dtype, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 200))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=4)))
    values = mixed_values(num_tokens, 3, dtype)
    bounds = [0, *cuts, num_tokens]
    for byte in range(PASSES[dtype]):
        prefix = middle_prefix(values, byte, "mixed")
        parts = [radix_counts(values[start:stop], prefix, byte) for start, stop in pairwise(bounds)]
        assert torch.equal(torch.stack(parts).sum(0).int(), radix_counts(values, prefix, byte))


@pytest.mark.parametrize(
    ("values", "prefix", "byte", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.float16), None, 0, "bfloat16 or float32, not torch.float16"),
        (torch.zeros(3, 2, dtype=torch.float64), None, 0, "bfloat16 or float32, not torch.float64"),
        (torch.zeros(3, 2, dtype=torch.int32), None, 0, "bfloat16 or float32, not torch.int32"),
        (torch.zeros(3), None, 0, r"\[tokens, experts\], got shape \(3,\)"),
        (torch.zeros(3, 2, 2), None, 0, r"\[tokens, experts\], got shape \(3, 2, 2\)"),
        (torch.zeros(3, 2), torch.zeros(2).long(), 4, "bytes 0 to 3, got byte 4"),
        (torch.zeros(3, 2).bfloat16(), torch.zeros(2).long(), 2, "bytes 0 to 1, got byte 2"),
        (torch.zeros(3, 2), None, -1, "bytes 0 to 3, got byte -1"),
        (torch.zeros(3, 2), None, 1, "byte 1 takes the prefix of the bytes above, got None"),
        (torch.zeros(3, 2), torch.zeros(2).long(), 0, "byte 0 takes no prefix"),
    ],
)
def test_what_counting_refuses(values: Tensor, prefix: Tensor | None, byte: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        radix_counts(values, prefix, byte)


def test_keys_are_made_from_bf16_and_fp32_only() -> None:
    with pytest.raises(ValueError, match=r"not torch.float64"):
        to_key(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"not torch.float16"):
        from_key(torch.zeros(3, dtype=torch.int64), torch.float16)


# selection


@QUICK
@given(data=st.data())
def test_select_rank_finds_the_bin(data: st.DataObject) -> None:
    bins = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=40))
    rank = data.draw(st.integers(1, len(bins)))
    counts = torch.tensor(np.bincount(bins, minlength=256))[None].int()
    chosen, left = select_rank(counts, None, torch.tensor([rank]))
    expected = sorted(bins)[rank - 1]
    assert chosen.tolist() == [expected]
    assert left.tolist() == [rank - sum(other < expected for other in bins)]
    longer, _ = select_rank(counts, torch.tensor([0xABCD]), torch.tensor([rank]))
    assert longer.tolist() == [0xABCD00 + expected]


def test_select_rank_of_counts_beyond_int32() -> None:
    counts = torch.zeros(2, 256, dtype=torch.int64)
    counts[:, 3], counts[:, 200] = 2**40, 5
    chosen, left = select_rank(counts, None, torch.tensor([2**40, 2**40 + 2]))
    assert chosen.tolist() == [3, 200]
    assert left.tolist() == [2**40, 2]
    # int32 counts whose sum is beyond int32
    chosen, left = select_rank(
        torch.full((1, 256), 2**31 - 1, dtype=torch.int32), None, torch.tensor([5 * (2**31 - 1)])
    )
    assert (chosen.tolist(), left.tolist()) == ([4], [2**31 - 1])


@every_dtype
@QUICK
@given(data=st.data())
def test_selection_equals_sorting(dtype: torch.dtype, data: st.DataObject) -> None:
    # few distinct values make heavy ties
    pool = data.draw(st.lists(floats, min_size=1, max_size=8))
    element = data.draw(st.sampled_from([floats, st.sampled_from(pool)]))
    column = data.draw(st.lists(element, min_size=1, max_size=60))
    rank = data.draw(st.integers(1, len(column)))
    cut = data.draw(st.integers(0, len(column)))
    values = bf16_or_fp32(column, dtype)[:, None]
    selected = radix_select([values[:cut], values[cut:]], torch.tensor([rank]))
    assert selected.item() == sorted(values.flatten().tolist())[rank - 1]
    assert selected.item() != 0 or not selected.signbit()


@every_dtype
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 7), (33, 60), (4500, 7)])
def test_selection_of_every_column(num_tokens: int, num_experts: int, dtype: torch.dtype) -> None:
    values = mixed_values(num_tokens, num_experts, dtype)
    rank = torch.randint(1, num_tokens + 1, (num_experts,), generator=torch.Generator().manual_seed(0))
    expected = [values[:, expert].float().kthvalue(int(rank[expert])).values for expert in range(num_experts)]
    assert torch.equal(radix_select([values], rank), torch.stack(expected))


def test_selection_is_the_quantile() -> None:
    # 101 values: the quarter falls on the 26th
    values = torch.randn(101, 7)
    assert torch.equal(radix_select([values], torch.full((7,), 26)), values.quantile(0.25, dim=0))


# ranks


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "order", "rank"),
    [
        # E4: an fp32 product gives 4
        (168, 16, 896, "q", 3),
        (168, 16, 896, "q_plus_1", 4),
        # E1: the target 2.5 rounds up
        (10, 2, 8, "q", 3),
        (10, 2, 8, "q_plus_1", 4),
        (0, 2, 8, "q", 0),
        (0, 2, 8, "q_plus_1", 0),
        (1, 1, 8, "q", 1),
        (1, 1, 8, "q_plus_1", 1),
        (2, 7, 8, "q", 2),
        (2, 7, 8, "q_plus_1", 2),
        (8, 7, 8, "q_plus_1", 8),
    ],
)
def test_target_rank(num_tokens: int, top_k: int, num_experts: int, order: str, rank: int) -> None:
    result = target_rank(torch.tensor(num_tokens), top_k, num_experts, order=order)
    assert (result.dtype, result.tolist()) == (torch.int64, rank)


@pytest.mark.parametrize("order", ["q", "q_plus_1"])
@QUICK
@given(num_tokens=st.integers(0, 2**40), num_experts=st.integers(2, 1024), data=st.data())
def test_target_rank_is_exact(order: str, num_tokens: int, num_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts - 1))
    rank = -(-num_tokens * top_k // num_experts)
    expected = rank if order == "q" else min(rank + 1, num_tokens)
    assert target_rank(torch.tensor([num_tokens]), top_k, num_experts, order=order).tolist() == [expected]


def test_target_rank_of_int32_counts() -> None:
    tokens = torch.tensor([2**31 - 1, 168, 0], dtype=torch.int32)
    assert target_rank(tokens, 16, 896).tolist() == [38347923, 3, 0]


def test_target_rank_of_an_unknown_order() -> None:
    with pytest.raises(ValueError, match="'q' or 'q_plus_1', got 'nearest'"):
        target_rank(torch.tensor(8), 1, 2, order="nearest")


@every_dtype
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_counts_of_pairs_are_those_of_the_columns(dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    values = torch.randn(num_tokens, 5, generator=generator).to(dtype)
    values[::4], values[1::4] = 0.0, -0.0
    values[2::9], values[5::9] = torch.inf, -torch.inf
    kept = torch.rand(num_tokens, 5, generator=generator) > 0.3
    experts = kept.nonzero()[:, 1].to(torch.int16)
    rank = (kept.sum(0) + 1) // 2
    prefix = None
    for byte in range(PASSES[dtype]):
        counts = pair_counts(values[kept], experts, 5, prefix, byte)
        for expert in range(5):
            column = values[kept[:, expert], expert, None]
            own = None if prefix is None else prefix[expert, None]
            assert torch.equal(counts[expert], radix_counts(column, own, byte)[0])
        prefix, rank = select_rank(counts, prefix, rank)
