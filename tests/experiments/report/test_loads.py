"""What is read of the load and the bias of every expert."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from equipoise.experiments.report.comparison import group_rows
from equipoise.experiments.report.loads import read_loads, worst_layers
from equipoise.experiments.report.reading import load_runs

# [steps, layers, experts]
LOADS = np.array([[[1, 3], [4, 4]], [[0, 8], [2, 6]], [[2, 2], [8, 0]]])


def test_by_hand(fake_runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "load.parquet"
    fake_runs.write_loads(path, LOADS, bias=LOADS / 8)
    loads = read_loads(path, [0, 1, 7], steps=3, start=2, columns=3)
    assert loads is not None
    assert (loads.layers, loads.width, loads.last_step_C.tolist()) == ([0, 1], 1, [1, 2, 3])
    np.testing.assert_array_equal(loads.load_PEC, [[[0.5, 0, 1], [1.5, 2, 1]], [[1, 0.5, 2], [1, 1.5, 0]]])
    np.testing.assert_array_equal(loads.bias_PEC, LOADS.transpose(1, 2, 0) / 8)
    # steps 2 and 3: loads 2 and 10 of the first layer, 10 and 6 of the second
    np.testing.assert_array_equal(loads.tail_PE, [[1 / 3, 5 / 3], [1.25, 0.75]])
    np.testing.assert_array_equal(loads.order_PE, [[1, 0], [0, 1]])


def test_neighbouring_steps_become_a_column(fake_runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "load.parquet"
    fake_runs.write_loads(path, LOADS, bias=LOADS / 8)
    loads = read_loads(path, [0], steps=3, start=3, columns=2)
    assert loads is not None
    assert loads.bias_PEC is not None
    assert (loads.width, loads.last_step_C.tolist()) == (2, [2, 3])
    np.testing.assert_allclose(loads.load_PEC[0], [[1 / 6, 1], [11 / 6, 1]])
    # the bias is that of the last step, not a mean
    np.testing.assert_array_equal(loads.bias_PEC[0], [[0, 0.25], [1, 0.25]])


def test_a_folder_of_parts_reads_like_a_file(fake_runs: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (20, 3, 4))
    fake_runs.write_loads(tmp_path / "file", counts, bias=rng.normal(size=counts.shape))
    (tmp_path / "parts").mkdir()
    frame = pd.read_parquet(tmp_path / "file")
    for part, own in frame.groupby((frame["step"] - 1) // 7):
        own.to_parquet(tmp_path / "parts" / f"part-{part}.parquet", index=False)
    file, parts = (read_loads(tmp_path / name, [0, 2], 20, 15, 6) for name in ("file", "parts"))
    assert file is not None
    assert parts is not None
    for name in ("load_PEC", "tail_PE", "bias_PEC"):
        np.testing.assert_array_equal(getattr(file, name), getattr(parts, name))


def test_what_is_not_there(fake_runs: ModuleType, tmp_path: Path) -> None:
    assert read_loads(tmp_path / "absent.parquet", [0], 3, 1, 3) is None
    fake_runs.write_loads(tmp_path / "old.parquet", LOADS)
    assert read_loads(tmp_path / "old.parquet", [5], 3, 1, 3) is None
    old = read_loads(tmp_path / "old.parquet", [0], steps=4, start=1, columns=4)
    assert old is not None
    assert old.bias_PEC is None
    # the fourth step was never recorded
    assert np.isnan(old.load_PEC[0, :, 3]).all()
    assert not np.isnan(old.load_PEC[0, :, :3]).any()


def test_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.parquet"
    pd.DataFrame({"step": [1], "layer": [0], "number": [3]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"load\.parquet is not a table of one count per step, layer and expert"):
        read_loads(path, [0], 1, 1, 1)
    path.write_text("no parquet")
    with pytest.raises(ValueError, match="is not a table"):
        read_loads(path, [0], 1, 1, 1)


def test_the_worst_layers_of_the_tail(fake_runs: ModuleType, tmp_path: Path) -> None:
    loads = np.ones((12, 6, 4), dtype=int)
    # layer 1 is worst early, layer 4 in the tail, layer 2 after it
    loads[:8, 1, 0] = 90
    loads[8:, 4, 0] = 50
    loads[8:, 2, 0] = 20
    fake_runs.write_run(tmp_path, "eqb", 0, loads=loads)
    # a row of another depth
    fake_runs.write_run(tmp_path, "none", 0, loads=loads[:, :3])
    rows = group_rows(load_runs(tmp_path))
    assert worst_layers(rows, 9, 1) == [4]
    assert worst_layers(rows, 9, 2) == [2, 4]
    assert worst_layers(rows, 1, 1) == [1]
    assert worst_layers(rows, 9, 8) == [0, 1, 2, 3, 4, 5]
