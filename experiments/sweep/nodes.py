"""The machines of one job. On Slurm submitit starts one process a node, and each starts the ranks of its node.

Node 0 alone writes the run folder, which lies where all nodes see it; the others wait for it and take part.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

# how long the nodes of a job wait for each other: a cold start of Python from a network disk takes minutes
PATIENCE_SECONDS = 600
# below the ports that Linux hands out by itself
FIRST_PORT, PORTS = 20000, 10000


@dataclass(frozen=True)
class Node:
    """This machine among the ``count`` of a job; ``head`` is the host name of node 0."""

    index: int = 0
    count: int = 1
    job: str = "0"
    head: str = "localhost"

    @property
    def endpoint(self) -> str:
        """Where the nodes meet: on node 0, at a port by the job's id, as another job may have a part of that machine.

        >>> Node(1, 2, "4711", "n1").endpoint
        'n1:24711'
        """
        return f"{self.head}:{FIRST_PORT + int(self.job) % PORTS}"

    def local_ranks(self, ranks: int) -> int:
        """How many of all ``ranks`` run here.

        Raises:
            ValueError: if they cannot be shared out evenly.
        """
        if ranks % self.count:
            raise ValueError(
                f"every node has as many ranks: expected parallel.ranks to be a multiple of the {self.count} nodes of "
                f"this job (hydra.launcher.nodes), got {ranks}"
            )
        return ranks // self.count


def find_node() -> Node:
    """This machine in a Slurm job of submitit; anywhere else a job has one node.

    Raises:
        ValueError: more than one process a node.
    """
    # whoever calls the command inside an allocation of several nodes means the machine that it is called on
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return Node()
    # an optional extra, which has started this process
    import submitit

    slurm = submitit.JobEnvironment()
    if slurm.num_tasks != slurm.num_nodes:
        raise ValueError(
            "one process a node starts its ranks: expected hydra.launcher.tasks_per_node=1, got "
            f"{slurm.num_tasks} processes on {slurm.num_nodes} nodes"
        )
    return Node(slurm.node, slurm.num_nodes, slurm.raw_job_id, slurm.hostnames[0])


def wait_for(path: Path, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until node 0 has written ``path``; a network disk may show a new file half a minute late.

    Raises:
        TimeoutError: if it is not there in time.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"node 0 has not written {path} in {seconds:.0f} s: see its log, and whether all nodes share the disk"
            )
        time.sleep(0.2)
