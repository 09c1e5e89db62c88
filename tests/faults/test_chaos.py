"""Random faults on a training that goes on and on: nothing is left, half or wrong; `make nightly`.

NBDIST_CHAOS_SEED (0) and NBDIST_CHAOS_FAULTS (200) choose the run; a failure prints both, and
the faults up to it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nbdist import NbdistError, RankDied, Session, checkpoint
from nbdist.checkpoint import FolderStorage
from tests.conftest import eventually
from tests.faults import training
from tests.processes import runs
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = int(os.environ.get("NBDIST_CHAOS_SEED", "0"))
FAULTS = int(os.environ.get("NBDIST_CHAOS_FAULTS", "200"))
EPISODE = 400
"""Steps after which the training begins anew."""
STOP_AGAIN_S = 4.0
GIVE_UP_S = 20.0
"""A Stop has to bring the prompt back by then."""
GONE_S = 10.0
ACROSS = 1e-4
"""Between engines losses differ in the last bits, and the training carries them on."""
LOOP = "while True: step()"
SAVING = """
while True:
    step()
    save(f"step-{{done:05d}}-{tag}", overwrite=True, keep=3, folder={root!r})
"""


@dataclass
class Chaos:
    """A training, what it must be like, and what has happened to it."""

    session: Session
    root: Path
    dice: random.Random
    expected: dict[str, list[float]]
    """Losses of a training without faults, by backend."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    started: set[psutil.Process] = field(default_factory=set)
    """Every process that was ever there."""
    done: int = 0
    gave_up: bool = False
    """Whether a Stop has not brought the prompt back."""
    tag: str = ""
    """The only engine that this state has been under, or "mixed"."""

    # -- the training

    def begin(self) -> None:
        """A new training on the ranks that are there."""
        self.session.run(training.MODEL + "import time")
        self.session.run("build()")
        self.done, self.tag = 0, self.session.backend
        self.save(wait=True)

    def train(self, steps: int) -> None:
        """Train on, as without any fault."""
        losses: Any = self.session.run(f"train({steps})", output="none").values
        assert losses[0] == losses[1]
        self.agrees(losses[0])
        self.done += steps

    def agrees(self, losses: list[float]) -> None:
        """These losses are those of a training without faults; bit by bit under one engine."""
        tag = "ddp" if self.tag == "mixed" else self.tag
        wanted = self.expected[tag][self.done : self.done + len(losses)]
        tolerance = ACROSS if self.tag == "mixed" else 0.0
        worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        assert worst <= tolerance, f"losses are {worst} off at step {self.done} ({self.tag})"

    def save(self, *, wait: bool) -> None:
        name = f"step-{self.done:05d}-{self.tag}"
        self.session.save(name, overwrite=True, keep=3, wait=wait, folder=self.root)

    def load(self) -> None:
        """Go on from the last checkpoint."""
        last = FolderStorage(self.root).list_checkpoints()[-1]
        self.session.load(last.name, folder=self.root)
        _, step, tag = last.name.split("-")
        self.done, self.tag = int(step), tag if tag == self.session.backend else "mixed"
        self.session.run(f"done = {self.done}")

    def restore(self) -> None:
        """New ranks that go on from the last checkpoint."""
        self.session.restart()
        self.session.run(training.MODEL + "import time")
        self.session.run("build()")
        self.load()

    # -- faults

    def during(
        self, action: Callable[[], object], disturb: Callable[[threading.Event], None]
    ) -> str:
        """Do something while another thread disturbs it; returns how it ended."""
        over = threading.Event()
        delay = self.dice.uniform(0, 0.5)
        thread = threading.Thread(target=lambda: over.wait(delay) or disturb(over))
        how, self.gave_up = "done", False
        try:
            thread.start()
            try:
                action()
            except (NbdistError, KeyboardInterrupt) as error:
                how = type(error).__name__
            finally:
                over.set()
                thread.join()
        except KeyboardInterrupt:  # a Stop that came when it was over
            over.set()
            thread.join()
        assert not self.gave_up, f"stuck: Stop has not ended it in {GIVE_UP_S:.0f} s"
        return how

    def stop(self, over: threading.Event) -> None:
        """Press Stop until the prompt is back; after a while wait no more."""
        main = threading.main_thread().ident
        assert main is not None
        for _ in range(int(GIVE_UP_S / STOP_AGAIN_S)):
            if not over.is_set():
                signal.pthread_kill(main, signal.SIGINT)
            if over.wait(STOP_AGAIN_S):
                return
        self.gave_up = True
        self.session.give_up()

    def signal_one(self, *numbers: signal.Signals) -> Callable[[threading.Event], None]:
        """Signals for one process of the session: a rank, or the launcher."""
        pids = [rank["pid"] for rank in self.session.status()["ranks"]]
        victim = psutil.Process(self.dice.choice([*pids, psutil.Process(pids[0]).ppid()]))
        pause = self.dice.uniform(0.05, 1.0)

        def act(_: threading.Event) -> None:
            for number in numbers:
                if victim.is_running():
                    victim.send_signal(number)
                threading.Event().wait(pause)

        return act

    def run(self, code: str) -> Callable[[], object]:
        """A cell of the notebook."""
        return lambda: self.session.run(code, output="none")

    def switch(self) -> None:
        """Change the engine; what fails leaves the one of before."""
        self.session.switch("fsdp2" if self.session.backend == "ddp" else "ddp")

    # -- after each fault

    def check(self) -> None:
        """What must be true whatever has happened."""
        for one in FolderStorage(self.root).list_checkpoints():
            checkpoint.verify_files(one.path)
        # a rank that died a moment ago may not be known of yet
        eventually(self.truthful, within_s=5)
        eventually(lambda: not self.orphans(), within_s=GONE_S)

    def truthful(self) -> bool:
        """Whether all ranks live, or the session is known to be dead."""
        status = self.session.status()
        up = status["state"] in {"ready", "running"}
        return not up or [rank["alive"] for rank in status["ranks"]] == [True, True]

    def orphans(self) -> set[psutil.Process]:
        """Processes of ranks and launchers that should be gone."""
        launcher = workers(self.session).launcher_group
        own = {psutil.Process(launcher.process.pid)} if launcher and launcher.is_alive else set()
        if self.session.state in {"ready", "running"}:
            own |= {child for one in own for child in one.children(recursive=True)}
        self.started |= own
        below = set(psutil.Process().children(recursive=True))
        return {one for one in (below | self.started) - own if runs(one.pid)}

    def settle(self) -> None:
        """Be ready for the next fault: as it is, or with new ranks."""
        if self.session.state == "running" and self.session.running is not None:
            self.session.interrupt()
            with suppress(NbdistError, KeyboardInterrupt):  # it has ended, in whatever way
                self.session.wait(GIVE_UP_S)
        if self.session.state != "ready":
            self.outcomes["ranks started anew"] += 1
            self.restore()
        else:
            # stopped between backward and step: a load refuses gradients that wait
            self.session.run("optimizer.zero_grad()")
            self.load()
        self.check()


# -- the faults: each returns how it ended, and leaves a session that may need to be settled

WAITING = "while True: time.sleep(0.001)"
ONE_RAISES = "if rank == {rank}: raise ValueError('on purpose')\n" + LOOP
ALONE = "if rank == {rank}: torch.distributed.all_reduce(torch.ones(1))"


def stop_python(chaos: Chaos) -> str:
    """Stop in Python code keeps everything."""
    before = chaos.session.run("fingerprint()", output="none").values
    how = chaos.during(chaos.run(WAITING), chaos.stop)
    assert chaos.session.state == "ready", how
    assert chaos.session.run("fingerprint()", output="none").values == before
    chaos.train(3)
    return how


def stop_training(chaos: Chaos) -> str:
    """Stop in a training: perhaps in a collective."""
    return chaos.during(chaos.run(LOOP), chaos.stop)


def one_rank_raises(chaos: Chaos) -> str:
    """The others wait for it, until Stop."""
    code = ONE_RAISES.format(rank=chaos.dice.randrange(2))
    return chaos.during(chaos.run(code), chaos.stop)


def one_rank_alone(chaos: Chaos) -> str:
    """A collective that nobody else comes to, until Stop."""
    code = ALONE.format(rank=chaos.dice.randrange(2))
    return chaos.during(chaos.run(code), chaos.stop)


def killed(chaos: Chaos) -> str:
    """A rank or the launcher ends during a training."""
    number = chaos.dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
    how = chaos.during(chaos.run(LOOP), chaos.signal_one(number))
    assert how in {"RankDied", "CellError", "CellInterrupted"}, how  # SIGTERM saves first
    eventually(lambda: chaos.session.state == "dead", within_s=30)
    return how


def killed_idle(chaos: Chaos) -> str:
    """A rank or the launcher ends while nothing runs."""
    chaos.signal_one(signal.SIGKILL)(threading.Event())
    eventually(lambda: chaos.session.state == "dead", within_s=5)
    with pytest.raises(RankDied):
        chaos.session.run("1")
    return "RankDied"


def paused(chaos: Chaos) -> str:
    """A process that stands still for a moment changes nothing."""
    act = chaos.signal_one(signal.SIGSTOP, signal.SIGCONT)
    how = chaos.during(lambda: chaos.train(100), act)
    assert how == "done", how
    return how


def killed_in_save(chaos: Chaos) -> str:
    """A rank or the launcher ends while checkpoints are written."""
    code = SAVING.format(tag=chaos.tag, root=str(chaos.root))
    return chaos.during(chaos.run(code), chaos.signal_one(signal.SIGKILL))


def stopped_in_save(chaos: Chaos) -> str:
    """Stop while checkpoints are written."""
    code = SAVING.format(tag=chaos.tag, root=str(chaos.root))
    return chaos.during(chaos.run(code), chaos.stop)


def killed_in_load(chaos: Chaos) -> str:
    """A rank or the launcher ends during a load."""
    return chaos.during(chaos.load, chaos.signal_one(signal.SIGKILL))


def stopped_in_load(chaos: Chaos) -> str:
    return chaos.during(chaos.load, chaos.stop)


def killed_in_switch(chaos: Chaos) -> str:
    """A rank or the launcher ends during a switch."""
    return chaos.during(chaos.switch, chaos.signal_one(signal.SIGKILL))


def stopped_in_switch(chaos: Chaos) -> str:
    return chaos.during(chaos.switch, chaos.stop)


def switched(chaos: Chaos) -> str:
    """No fault: the training goes on under another engine."""
    chaos.switch()
    chaos.tag = "mixed"
    chaos.train(5)
    return "done"


def restarted(chaos: Chaos) -> str:
    """New ranks while a cell runs."""
    chaos.session.run(LOOP, background=True)
    chaos.restore()
    return "done"


KINDS = (
    stop_python,
    stop_training,
    one_rank_raises,
    one_rank_alone,
    killed,
    killed_idle,
    paused,
    killed_in_save,
    stopped_in_save,
    killed_in_load,
    stopped_in_load,
    killed_in_switch,
    stopped_in_switch,
    switched,
    restarted,
)


def losses_without_faults(session: Session, steps: int, *backends: str) -> dict[str, list[float]]:
    """By backend; the last one stays."""
    found: dict[str, Any] = {}
    for backend in backends:
        session.switch(backend)
        session.run(training.MODEL)
        code = f"build(); losses = train({steps})\nlosses"
        found[backend] = session.run(code, output="none").values[0]
    return found


def hurt(chaos: Chaos, kind: Callable[[Chaos], str]) -> None:
    """One fault and what must be true after it; the training goes on as without it."""
    chaos.faults.append(kind.__name__)
    if chaos.done > EPISODE - 120:
        chaos.session.restart(backend=chaos.dice.choice(["ddp", "fsdp2"]))
        chaos.begin()
    chaos.train(chaos.dice.randrange(1, 20))
    chaos.save(wait=chaos.dice.random() < 0.5)
    how = kind(chaos)
    chaos.faults[-1] += f": {how}"
    chaos.outcomes[chaos.faults[-1]] += 1
    chaos.check()
    chaos.settle()
    chaos.train(3)


@pytest.mark.fault("E14")
@pytest.mark.timeout(240)
def test_a_stopped_save_or_load_leaves_nothing_half(tmp_path: Path) -> None:
    with Session(nproc=2) as session:
        dice = random.Random(0)  # noqa: S311 - any moments
        chaos = Chaos(session, tmp_path / "root", dice, losses_without_faults(session, 100, "ddp"))
        chaos.begin()
        for kind in (stopped_in_load, stopped_in_save, stopped_in_load):
            hurt(chaos, kind)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_random_faults_lose_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)  # noqa: S311 - any faults
    with Session(nproc=2) as session:
        chaos = Chaos(
            session,
            tmp_path / "root",
            dice,
            losses_without_faults(session, EPISODE, "fsdp2", "ddp"),
        )
        chaos.begin()
        try:
            for _ in range(FAULTS):
                hurt(chaos, dice.choice(KINDS))
        except BaseException as error:
            listed = "\n".join(f"{number} {what}" for number, what in enumerate(chaos.faults))
            error.add_note(f"NBDIST_CHAOS_SEED={SEED} NBDIST_CHAOS_FAULTS={FAULTS}\n{listed}")
            raise
        finally:
            with capsys.disabled():
                for what, count in sorted(chaos.outcomes.items()):
                    print(f"{count:5} {what}")  # noqa: T201 - what the run was made of
