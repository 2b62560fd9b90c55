"""Fixed-point margins that travel as bf16 numbers."""

import pytest
import torch

from equipoise.kernels import FixedScale, to_key
from equipoise.kernels.fixed import MAX_LEVELS

LOWER, UPPER = torch.tensor(-1.25), torch.tensor(1.5)
every_bits = pytest.mark.parametrize("bits", range(8, 17))


@every_bits
def test_every_level_has_a_normal_number_of_its_own_in_order(bits: int) -> None:
    scale = FixedScale.of_bits(LOWER, UPPER, bits)
    margins = scale.to_margin(torch.arange(scale.levels)).float()
    codes = scale.to_code(margins)
    assert (codes.float()[1:] > codes.float()[:-1]).all()
    assert (codes.float().abs() >= torch.finfo(torch.bfloat16).smallest_normal).all()
    keys = to_key(codes)
    assert torch.equal(scale.code_level(keys), torch.arange(scale.levels))
    assert torch.equal(scale.to_code_key(torch.arange(scale.levels)), keys)
    torch.testing.assert_close(scale.from_code_key(keys).float(), margins)


@every_bits
def test_rounds_to_the_nearest_level(bits: int) -> None:
    scale = FixedScale.of_bits(LOWER, UPPER, bits)
    margins = torch.rand(5000, generator=torch.Generator().manual_seed(bits)) * (UPPER - LOWER) + LOWER
    spacing = (UPPER - LOWER).item() / (scale.levels - 1)
    error = (scale.to_margin(scale.to_level(margins)) - margins.double()).abs().max().item()
    # beside the half of a spacing, a rounding of the margin itself
    assert 0.45 * spacing < error <= 0.5 * spacing + 4e-7


def test_sixteen_bits_have_the_levels_that_there_are() -> None:
    assert FixedScale.of_bits(LOWER, UPPER, 16).levels == MAX_LEVELS == 65024
    assert FixedScale.of_bits(LOWER, UPPER, 15).levels == 2**15


def test_what_lies_outside_takes_the_outermost_level_and_nan_stays() -> None:
    scale = FixedScale.of_bits(LOWER, UPPER, 10)
    assert scale.to_level(torch.tensor([-9.0, -1.25, 1.5, 9.0])).tolist() == [0, 0, 1023, 1023]
    assert scale.to_code(torch.tensor([torch.nan, 0.0])).isnan().tolist() == [True, False]
    assert scale.from_code_key(torch.tensor([0])).isnan().all()
