import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from equipoise.balancers import BiasBalancer
from equipoise.kernels import Routing, route

Feed = Callable[..., Routing]

# these tensors are small: a second thread only waits for the first
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def feed() -> Feed:
    """One forward of a router: ``feed(balancer, logits [T, E], valid=None, **options of route)``."""

    def forward(
        balancer: BiasBalancer, logits: Tensor, valid: Tensor | None = None, selection: str = "score"
    ) -> Routing:
        routing = route(logits, balancer.bias, balancer.top_k, tally=balancer.tally, valid=valid, selection=selection)
        balancer.observe(routing)
        return routing

    return forward


@pytest.fixture(scope="session")
def gloo_worker() -> ModuleType:
    """The script that every rank of a process group runs; loaded by path, as tests are no package."""
    spec = importlib.util.spec_from_file_location("gloo_worker", Path(__file__).with_name("gloo_worker.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
