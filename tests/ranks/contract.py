"""The rows of the contract test, for ranks and for tests outside its file; loaded by path, as tests are no package."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "ranks_contract", Path(__file__).parents[1] / "balancers" / "test_contract.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
# dataclasses look their module up
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)

BIAS = _module.BIAS
GRADIENT = _module.GRADIENT
tensors = _module.tensors
