"""Measures of balance against numpy and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancers.metrics import (
    dead_share,
    device_max_violation,
    intervention_rate,
    load_cv,
    load_entropy,
    max_violation,
    residual,
)
from equipoise.kernels import route

loads = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=6, max_size=6).filter(any), min_size=1, max_size=4)


def test_max_violation_worked_examples() -> None:
    assert max_violation(torch.tensor([10, 6, 4, 0])).item() == 1.0
    assert max_violation(torch.tensor([6, 6, 6, 2])).item() == pytest.approx(0.2, rel=1e-15)


def test_collapsed_cells_are_unbalanced_locally_and_balanced_globally() -> None:
    cells = 7 * torch.eye(4, dtype=torch.int32)
    assert max_violation(cells).tolist() == [3.0, 3.0, 3.0, 3.0]
    assert max_violation(cells.sum(0)).item() == 0.0


@settings(deadline=None, max_examples=60)
@given(loads)
def test_against_numpy(rows: list[list[int]]) -> None:
    load = np.array(rows, dtype=np.float64)
    mean = load.mean(-1, keepdims=True)
    given_load = torch.tensor(rows, dtype=torch.int32)
    shares = load / load.sum(-1, keepdims=True)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    expected = {
        residual: load / mean - 1,
        max_violation: load.max(-1) / mean[:, 0] - 1,
        dead_share: (load == 0).mean(-1),
        load_cv: load.std(-1) / mean[:, 0],
        load_entropy: -(shares * logs).sum(-1) / np.log(6),
    }
    for metric, value in expected.items():
        found = metric(given_load)
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-9, atol=1e-9, err_msg=metric.__name__)
        # each row on its own, as with a load [E]
        np.testing.assert_array_equal(metric(given_load[0]).numpy(), found[0].numpy())
    assert residual(given_load).sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_shapes_and_integer_dtypes(dtype: torch.dtype) -> None:
    load = torch.tensor([[[10, 6, 4, 0], [5, 5, 5, 5], [0, 0, 0, 20]]] * 2, dtype=dtype)
    assert max_violation(load).tolist() == [[1.0, 0.0, 3.0]] * 2
    assert dead_share(load).tolist() == [[0.25, 0.0, 0.75]] * 2
    assert load_cv(load)[0, 1:].tolist() == pytest.approx([0.0, 3**0.5])
    assert load_entropy(load)[0, 1:].tolist() == pytest.approx([1.0, 0.0])


def test_large_counts_do_not_overflow() -> None:
    load = torch.tensor([2**31 - 1, 2**31 - 1, 0, 0], dtype=torch.int32)
    assert max_violation(load).item() == 1.0
    assert dead_share(load).item() == 0.5
    assert device_max_violation(load, 2).item() == 1.0


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_no_token_is_balanced(shape: tuple[int, ...]) -> None:
    load = torch.zeros(shape, dtype=torch.int32)
    for metric in (max_violation, dead_share, load_cv):
        assert metric(load).shape == shape[:-1]
        assert not metric(load).any()
    assert (load_entropy(load) == 1.0).all()
    assert not residual(load).any()
    assert not device_max_violation(load, 2).any()


def test_residual_has_the_same_bits_for_the_same_proportions() -> None:
    load = torch.tensor([3, 1, 0, 7, 2])
    assert torch.equal(residual(load), residual(3 * load))


def test_device_view() -> None:
    load = torch.tensor([[10, 6, 4, 0], [5, 5, 5, 5], [0, 8, 8, 0]])
    assert torch.equal(device_max_violation(load, 4), max_violation(load))
    assert device_max_violation(load, 2).tolist() == pytest.approx([0.6, 0.0, 0.0])
    assert device_max_violation(load, 1).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num_devices", [0, -1, 3, 8])
def test_device_view_needs_a_divisor(num_devices: int) -> None:
    with pytest.raises(ValueError, match=f"must divide the 4 experts, got {num_devices}"):
        device_max_violation(torch.tensor([1, 2, 3, 4]), num_devices)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 30), st.integers(2, 9), st.booleans(), st.sampled_from(["score", "logit"]))
def test_intervention_rate_counts_changed_choices(
    seed: int, count: int, num_experts: int, masked: bool, selection: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = int(torch.randint(1, num_experts, (), generator=generator))
    logits = torch.randn(count, num_experts, generator=generator)
    bias = 0.5 * torch.randn(num_experts, generator=generator)
    valid = torch.rand(count, generator=generator) < 0.6 if masked else None
    routing = route(logits, bias, top_k, valid=valid, selection=selection)
    changed = [
        1 - len(set(biased.tolist()) & set(plain.topk(top_k).indices.tolist())) / top_k
        for biased, plain in zip(routing.experts, logits, strict=True)
    ]
    counted = [share for share, real in zip(changed, [True] * count if valid is None else valid, strict=True) if real]
    expected = sum(counted) / len(counted) if counted else 0.0
    rate = intervention_rate(routing)
    assert rate.shape == ()
    assert rate.dtype == torch.float64
    assert rate.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_zero_bias_intervenes_nowhere(gate: str) -> None:
    # ties too: coarse logits
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)).round().requires_grad_()
    for bias in (None, torch.zeros(8)):
        rate = intervention_rate(route(logits, bias, 3, gate=gate))
        assert rate.item() == 0.0
        assert not rate.requires_grad


def test_random_choice_has_the_rate_of_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    # the bias decides alone: every token's scores are shuffled under a fixed choice
    routing = route(torch.randn(20000, 8, generator=generator), torch.tensor([9.0, 9, 0, 0, 0, 0, 0, 0]), 2)
    assert intervention_rate(routing).item() == pytest.approx(1 - 2 / 8, abs=0.01)
