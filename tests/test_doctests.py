"""Every doctest of the package runs."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import equipoise.balancers
import equipoise.experiments
import equipoise.kernels

PACKAGES = [equipoise.kernels, equipoise.balancers, equipoise.experiments]
MODULES = [
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not info.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"


@pytest.mark.parametrize("package", [equipoise.kernels, equipoise.balancers])
def test_there_are_examples(package: ModuleType) -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in MODULES if name.startswith(package.__name__ + ".")]
    assert sum(len(test.examples) for module in modules for test in finder.find(module)) > 0
