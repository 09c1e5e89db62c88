"""Two hosts with one rank each: an empty cell against one host with two, training against torchrun.

The hosts are two network namespaces of this machine, joined by a veth pair; only root can make
them. All sides live at the same time and take turns, the kernels and torchrun's first rank on one
host. No Ray is needed: a cluster gives nodes and starts agents, and no cell goes through it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kernels import Kernel
from results import Row, middle, ms
from training import LOOP, Script, our_seconds, pipes, speed_row

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.two_nodes import Hosts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

CELLS = 60
WARM_UP = 10
PORT = 29507
EMPTY = "empty cell on 2 hosts x 1 rank, against 1 host x 2"
TRAINING = "training on 2 hosts x 1 rank, against torchrun --nnodes 2"
NEW_RANKS = "%%distribute -n 2 --precision no\n"


def measure(build: Path) -> Iterator[Row]:
    """Both rows; skipped where no hosts can be made."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts())
        except OSError as error:
            why = f"no network namespaces can be made here: {str(error).strip()}"
            yield Row(name=EMPTY, value=0, unit="x", limit=1.5, skipped=why)
            yield Row(name=TRAINING, value=0, unit="x", limit=0.97, sense=">=", skipped=why)
            return
        print(f"link: {link(hosts)}", flush=True)
        over = stack.enter_context(kernel(hosts))
        over.run(stand_in(hosts))
        over.run('%config NbDist.on = "ray"')
        over.run(f"{NEW_RANKS}pass")
        yield empty(hosts, over)
        yield training(hosts, over, build)


def kernel(hosts: Hosts) -> Kernel:
    """A notebook's kernel on the host alpha."""
    started = Kernel(sys.executable, within=hosts.inside("alpha"))
    started.run("%load_ext nbdist")
    return started


def stand_in(hosts: Hosts) -> str:
    """The cell after which `--on ray` means these hosts."""
    return (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.doubles import two_hosts\n"
        f"two_hosts.stand_in({hosts.prefix!r})"
    )


def link(hosts: Hosts) -> str:
    """What joins the hosts, in words."""
    of_cable = "/sys/class/net/cable"
    command = [*hosts.inside("alpha"), "cat", f"{of_cable}/mtu", f"{of_cable}/speed"]
    mtu, speed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return f"veth of one machine, MTU {mtu}, which calls itself {speed} Mb/s and has no limit"


def empty(hosts: Hosts, over: Kernel) -> Row:
    times: dict[Kernel, list[float]] = {}
    with kernel(hosts) as one_host:
        one_host.run(f"{NEW_RANKS}pass")
        for number in range(-WARM_UP, CELLS):
            for side in (over, one_host):
                seconds = side.run("%%distribute\npass").seconds
                if number >= 0:
                    times.setdefault(side, []).append(seconds)
    two, one = middle(times[over]), middle(times[one_host])
    return Row(name=EMPTY, value=two / one, unit="x", limit=1.5, detail=f"{ms(two)} / {ms(one)}")


def training(hosts: Hosts, over: Kernel, build: Path) -> Row:
    """The row about training: the model and the steps of `training.py`."""
    with torchrun(hosts, build) as script:
        over.run(f"%%distribute\n{LOOP.setup}")
        return speed_row(
            TRAINING,
            lambda: our_seconds(over, LOOP),
            script.seconds,
            limit=0.97,
            detail=f"; {link(hosts)}",
        )


@contextmanager
def torchrun(hosts: Hosts, build: Path) -> Iterator[Script]:
    """The same script, started by torchrun on each host; ended when the block is left."""
    folder = build / "bench-nodes"
    go, done = pipes(folder)
    file = folder / "train.py"
    file.write_text(LOOP.as_script())
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen(
                [*hosts.inside(name), *command(number), str(file), str(go), str(done)],
                stdout=log,
                stderr=log,
                env={**environ, "OMP_NUM_THREADS": "1"},
            )
            for number, name in enumerate(hosts.spaces)
        ]
        script = Script(go, done)
        try:
            yield script
            script.end()
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.terminate()  # its agent ends its rank
                process.wait(60)


def command(number: int) -> list[str]:
    """Command line of torchrun on one host, as its manual has it; both meet on the first."""
    options = (
        f"--nnodes 2 --nproc-per-node 1 --node-rank {number}"
        f" --master-addr {Hosts.addresses['alpha']} --master-port {PORT}"
    )
    return [str(Path(sys.executable).with_name("torchrun")), *options.split()]
