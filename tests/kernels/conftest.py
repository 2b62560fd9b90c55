from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from torch import Tensor

settings.register_profile("kernels", deadline=None, max_examples=40)

# (relative, absolute): what rounding once or twice in that dtype may cost against fp64
TOLERANCES = {
    torch.float64: (1e-11, 1e-13),
    torch.float32: (2e-6, 1e-6),
    torch.bfloat16: (1e-2, 1e-3),
    torch.float16: (1e-3, 1e-4),
}


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare with an fp64 oracle, within the tolerance of the dtype under test."""

    def check(actual: Tensor, expected: Tensor) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)

    return check


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Give the number of threads back that the test has changed."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def restore_default_dtype() -> Iterator[None]:
    """Give the default dtype back that the test has changed."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
