"""What is said of files in a run folder that are not what they should be."""

from pathlib import Path
from types import ModuleType

import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report.reading import load_run


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "seed: [0\n", r"config\.yaml is not YAML: .* line 2"),
        ("config.yaml", "- seed\n", r"config\.yaml: expected a mapping"),
        ("config.yaml", "balancer: {name: eqb}\nseed: 0\n", r"config\.yaml is not the config of a run .*'optim'"),
        (
            "config.yaml",
            "balancer: {name: eqb}\nseed: 0\noptim: {steps: 1}\nreport: 3\n",
            r"config\.yaml: expected a mapping in report, got 3",
        ),
        ("environment.json", "{", r"environment\.json is not JSON: "),
        ("environment.json", "[1]", r"environment\.json: expected a JSON object, got list"),
        ("environment.json", '{"data": [1]}', r"environment\.json: expected a mapping in data, got \[1\]"),
        ("environment.json", '{"versions": "2.13"}', r"environment\.json: expected a mapping in versions, got '2.13'"),
        ("failed.json", "3", r"failed\.json: expected a JSON object, got int"),
    ],
)
def test_a_broken_file_is_named(fake_runs: ModuleType, tmp_path: Path, name: str, text: str, message: str) -> None:
    run = fake_runs.write_run(tmp_path, "eqb", 0)
    (run / name).write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        load_run(run)
    assert "object at 0x" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_summary_that_cannot_be_read_is_not_a_complete_run(fake_runs: ModuleType, tmp_path: Path, text: str) -> None:
    run = fake_runs.write_run(tmp_path, "eqb", 0)
    assert load_run(run).complete
    (run / "summary.json").write_text(text)
    assert not load_run(run).complete
    with pytest.raises(ValueError, match="s0 not finished at step 12/12: its summary cannot be read"):
        report.build_report(tmp_path)
