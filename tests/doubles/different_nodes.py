"""An agent whose node has what its name says here; NVML, memory and cores are pretended."""

import os

import nbdist.hardware.discovery
from nbdist.cluster import agent
from tests.doubles.nvml import GIB, FakeGpu, FakeNvml

HAS = {
    "alpha": (64, 32, "NVIDIA A100-SXM4-80GB", 80, (8, 0)),
    "beta": (12, 4, "Tesla T4", 15, (7, 5)),
}
"""GiB of host memory, cores, and of each of two GPUs name, GiB and compute capability."""


def gpus(node: str) -> tuple[str, ...]:
    return tuple(f"GPU-{node}-{place}" for place in range(2))


def pretend(node: str) -> None:
    """Let this process take its machine for this node."""
    memory, cores, name, gib, capability = HAS[node]
    fake = FakeNvml([FakeGpu(uuid, name, gib * GIB, capability) for uuid in gpus(node)])
    nbdist.hardware.discovery.import_pynvml = lambda: fake  # type: ignore[assignment, return-value]
    nbdist.hardware.discovery.host_memory_bytes = (
        nbdist.hardware.discovery.host_free_memory_bytes
    ) = lambda: memory * GIB
    nbdist.hardware.discovery._num_cpus = lambda: cores


if __name__ == "__main__":
    pretend(os.environ["NBDIST_TEST_NODE"])
    agent.main()
