import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

settings.register_profile("kernels", deadline=None, max_examples=40)

# the examples that the four tests of test_fuzz share; scripts/fuzz asks for more of them, other ones every time
FUZZED = os.environ.get("EQUIPOISE_FUZZ_EXAMPLES")
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=-(-int(FUZZED or 300) // 4),
    derandomize=FUZZED is None,
    suppress_health_check=[HealthCheck.too_slow],
)

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


@pytest.fixture(scope="session")
def is_close() -> Callable[[Tensor, Tensor], bool]:
    """``assert_close`` without a report, for many small tensors: it takes a tenth of the time."""

    def check(actual: Tensor, expected: Tensor) -> bool:
        rtol, atol = TOLERANCES[actual.dtype]
        return torch.allclose(actual.double(), expected.double(), rtol=rtol, atol=atol)

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
