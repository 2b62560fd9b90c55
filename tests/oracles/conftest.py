"""The recorder behind every comparison with another project's code, and its table at the end of the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oracles.inputs import MASKED, UNMASKED, Inputs

# relative to the largest value: fp32 sums in another order
TOLERANCE = 1e-5


@dataclass
class Row:
    """What was compared over all inputs, and the two numbers that lie furthest apart."""

    convention: str
    inputs: list[str] = field(default_factory=list)
    ours: float = 0.0
    theirs: float = 0.0
    difference: float = -1.0


# (project and version, what is compared)
Table = dict[tuple[str, str], Row]
TABLE = pytest.StashKey[Table]()


@pytest.fixture
def compare(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Callable[..., None]:
    """``compare(what, inputs, ours, theirs, factor=1, within=TOLERANCE, convention="")`` notes both, and fails unless
    ``theirs`` is ``factor * ours`` within a tolerance relative to the largest of ``theirs``; 0 is the same numbers.
    """
    project = request.module.PROJECT
    table = pytestconfig.stash.setdefault(TABLE, {})

    def check(
        what: str,
        inputs: str,
        ours: Tensor,
        theirs: Tensor,
        *,
        factor: float = 1.0,
        within: float = TOLERANCE,
        convention: str = "",
    ) -> None:
        ours, theirs = ours.detach().double(), theirs.detach().double()
        assert ours.shape == theirs.shape, (what, inputs)
        apart = (factor * ours - theirs).abs().flatten() / (theirs.abs().max() or 1.0)
        worst = int(apart.argmax())
        row = table.setdefault((f"{project} {version(project)}", what), Row(convention))
        if inputs not in row.inputs:
            row.inputs.append(inputs)
        if not float(apart[worst]) <= row.difference:
            row.ours, row.theirs = float(ours.flatten()[worst]), float(theirs.flatten()[worst])
            row.difference = float(apart[worst])
        assert float(apart[worst]) <= within, f"{what}, {inputs}: ours {row.ours}, theirs {row.theirs}"

    return check


@pytest.fixture(params=[*UNMASKED, *MASKED], ids=lambda inputs: inputs.name)
def inputs(request: pytest.FixtureRequest) -> Inputs:
    """Every input, with and without padding."""
    return request.param


@pytest.fixture(params=UNMASKED, ids=lambda inputs: inputs.name)
def unmasked(request: pytest.FixtureRequest) -> Inputs:
    """Every input without padding, for what knows no mask."""
    return request.param


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for code that sums over ranks unasked."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One table in Markdown for each project."""
    table = config.stash.get(TABLE, {})
    for project in dict.fromkeys(project for project, _ in table):
        rows = {what: row for (owner, what), row in table.items() if owner == project}
        names = list(dict.fromkeys(name for row in rows.values() for name in row.inputs))
        terminalreporter.section(f"{project} (torch {torch.__version__})")
        terminalreporter.line("| compared | inputs | ours | theirs | largest difference | convention |")
        terminalreporter.line("|---|---|---|---|---|---|")
        for what, row in rows.items():
            numbers = " ".join(str(names.index(name) + 1) for name in row.inputs)
            values = f"{row.ours:.7g} | {row.theirs:.7g} | {row.difference:.1e}"
            terminalreporter.line(f"| {what} | {numbers} | {values} | {row.convention or 'the same'} |")
        terminalreporter.line("")
        terminalreporter.line("Inputs: " + "; ".join(f"{index + 1}: {name}" for index, name in enumerate(names)) + ".")
        terminalreporter.line("Ours and theirs where they differ most, and by how much relative to the largest value.")
