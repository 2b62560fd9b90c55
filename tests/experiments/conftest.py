import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fake_runs() -> ModuleType:
    """The module that writes synthetic run folders; loaded by path, as tests are no package."""
    spec = importlib.util.spec_from_file_location("fake_runs", Path(__file__).with_name("fake_runs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
