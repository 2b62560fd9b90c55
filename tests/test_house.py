"""The habits of the house: lint, format and types, and nothing in the tree that belongs to one machine."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_lint_format_and_types_are_clean():
    result = subprocess.run([ROOT / "scripts" / "check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_arrow_runs_back_up():
    """Kernels know no balancers, balancers no experiments, and nobody the benchmarks; relative imports inside."""
    above = {
        "kernels": ("balancers", "experiments", "bench"),
        "balancers": ("experiments", "bench"),
        "experiments": ("bench",),
        "bench": (),
    }
    for package, forbidden in above.items():
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "from equipoise" not in text, path
            assert "import equipoise" not in text, path
            for name in forbidden:
                assert not re.search(rf"from \.+{name}", text), path


def test_only_the_fused_kernels_import_triton():
    """Everything else works without it."""
    for package in ("kernels", "balancers", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name != "fused":
                assert not re.search(r"^(import|from) triton", path.read_text(encoding="utf-8"), re.MULTILINE), path
