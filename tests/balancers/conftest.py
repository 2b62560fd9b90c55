from collections.abc import Callable

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
