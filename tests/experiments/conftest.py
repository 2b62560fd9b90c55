import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report import plots
from equipoise.experiments.report.comparison import Row


@pytest.fixture(scope="session")
def fake_runs() -> ModuleType:
    """The module that writes synthetic run folders; loaded by path, as tests are no package."""
    spec = importlib.util.spec_from_file_location("fake_runs", Path(__file__).with_name("fake_runs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sweep(fake_runs: ModuleType, tmp_path: Path) -> Path:
    """eqb and none, three complete seeds each."""
    for name, offset in (("none", 3.0), ("eqb", 0.0)):
        fake_runs.write_three_seeds(tmp_path / "table", name, offset)
    return tmp_path / "table"


@pytest.fixture(scope="session")
def drawn(fake_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> report.Report:
    """A whole report, figures and all, of a sweep with a hole."""
    folder = tmp_path_factory.mktemp("runs") / "table"
    rng = np.random.default_rng(0)
    rows = (("eqb_lei", 0.5, 1e-5), ("eqb_lei", 0.6, 2e-5), ("eqb", 1.0, None), ("my_<own>|one", 1.5, None))
    for name, level, eta in rows:
        for seed in range(3):
            loads = fake_runs.realistic_loads(level, rng, 12, 2, 8)
            bias = fake_runs.realistic_bias(loads) if "eqb" in name else np.full(loads.shape, np.nan)
            values = {key: [level + 0.1 * rng.random() for _ in range(12)] for key in ("global_maxvio", "loss")}
            changes = {"balancer.gradient.eta": eta} if eta else {}
            fake_runs.write_run(
                folder, name, seed, values=values, loads=loads, bias=bias, changes=changes, suffix=f"{eta or ''}"
            )
    error = "rank 1: <script>\nno memory"
    fake_runs.write_run(folder, "none", 0, steps=4, planned=12, values={"loss": 4.0}, error=error)
    return report.build_report(folder)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests are about the numbers; drawing takes a second or two."""

    def draw_all(rows: Sequence[Row], folder: Path, start: int) -> list[plots.Picture]:
        (folder / "summary.png").write_bytes(b"png")
        return [plots.Picture(folder / "summary.png", "a picture")]

    monkeypatch.setattr(plots, "draw_all", draw_all)
