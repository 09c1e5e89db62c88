"""The debugger and `input()` on ranks, as a user of a notebook meets them."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.protocol.messages import END_OF_INPUT
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAINING = textwrap.dedent(
    """
    import torch.distributed as dist
    from tests.models import gpt2

    def train(steps, stop=lambda step: False):
        torch.manual_seed(0)
        bare = gpt2()
        model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=3e-3))
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for step in range(steps):
            tokens = torch.randint(0, 211, (2, 24), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            if stop(step):
                breakpoint()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses
    """
)


@pytest.fixture(scope="module")
def ranks(notebook: LiveKernel) -> LiveKernel:
    """A notebook with two ranks on which a training is defined."""
    assert notebook.run(f"%%distribute --nproc 2\n{TRAINING}").status == "ok"
    return notebook


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[LiveKernel]:
    """A notebook that a test may damage."""
    with LiveKernel(tmp_path) as kernel:
        assert kernel.run("%load_ext nbdist\nimport nbdist").status == "ok"
        yield kernel


def test_breakpoint_opens_the_debugger_of_a_rank(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        total = torch.ones(1)
        if rank == 1:
            breakpoint()
            doubled = 2 * rank
        dist.all_reduce(total)
        total.item()
    """
    shown, prompts = ranks.run_with_answers(
        cell(code), "p rank", "n", "!rank + 40", "p doubled", "c"
    )
    assert prompts[0].startswith("[rank 1] In[")
    assert prompts[0].endswith("] line 5 ipdb> ")
    assert prompts[1] == prompts[0]
    assert prompts[2].endswith("] line 6 ipdb> ")
    assert "nbdist: rank 0 waits in all_reduce at line 6" in shown.text
    assert "[1] 41" in shown.text
    assert "[1] 2\n" in shown.text
    assert "[0-1] 2.0" in shown.text
    assert shown.status == "ok"


def test_several_stopped_ranks_have_one_prompt(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        same = 7
        breakpoint()
        total = torch.ones(1)
        dist.all_reduce(total)
        total.item()
    """
    shown, prompts = ranks.run_with_answers(
        cell(code), "p rank", "rank 1", "p rank + 10", "rank 5", "all p same", "all c"
    )
    stopped_ranks = [prompt.split("]")[0] for prompt in prompts]
    assert stopped_ranks == ["[rank 0", "[rank 0", "[rank 1", "[rank 1", "[rank 1", "[rank 1"]
    assert "nbdist: rank 1 is stopped too" in shown.text
    assert "[1] 11" in shown.text
    assert "rank 5 is not stopped; stopped: ranks 0-1" in shown.text
    assert shown.text.count("[0-1] 7") == 1
    assert "[0-1] 2.0" in shown.text


@pytest.mark.parametrize("command", ["q", "all q", nightly("quit")])
def test_quitting_stops_all_ranks_after_the_same_step(ranks: LiveKernel, command: str) -> None:
    code = "%%distribute\nkept = rank\ntrain(5, stop=lambda step: rank == 1 and step == 2)"
    shown, _ = ranks.run_with_answers(code, command)
    assert "Interrupted on all ranks; all variables are kept." in shown.text
    check = "%%distribute\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(total.item(), kept)"
    text = ranks.run(check).text
    assert "[0] (2.0, 0)" in text
    assert "[1] (2.0, 1)" in text


def test_stepping_does_not_stop_in_code_of_nbdist(ranks: LiveKernel) -> None:
    """There it would hold a lock that an interrupt needs."""
    shown, prompts = ranks.run_with_answers(
        "%%distribute\ntrain(3, stop=lambda step: rank == 1)", "n", "s", "s", "s", "q"
    )
    files = [prompt.split()[2] for prompt in prompts]
    assert files[0].startswith("In[")
    assert not {"prepared_models.py", "optimizer_step_gate.py", "contextlib.py"} & {*files}
    assert "ignored module" not in shown.text
    assert "all variables are kept" in shown.text


def test_output_is_merged_after_a_rank_was_debugged(ranks: LiveKernel) -> None:
    code = "%%distribute\nif rank == 1:\n    breakpoint()\ndist.barrier()\nprint('after')"
    shown, _ = ranks.run_with_answers(code, "p rank", "c")
    assert "[0-1] after" in shown.text


def test_interrupting_at_a_prompt_stops_all_ranks(ranks: LiveKernel) -> None:
    code = "%%distribute\nif rank == 1:\n    breakpoint()\nkept = rank\ndist.barrier()"
    request = ranks.send(code)
    assert ranks.next_prompt().startswith("[rank 1] ")
    ranks.manager.interrupt_kernel()
    assert "Interrupted on all ranks; all variables are kept." in ranks.collect(request).text
    assert "[0-1] 2" in ranks.run("%%distribute\ndist.barrier()\nworld_size").text
    assert "did not fail on any rank" in ranks.run("%debug").text


def test_interact_opens_a_console_in_the_frame(ranks: LiveKernel) -> None:
    code = "%%distribute\nif rank == 1:\n    value = 5\n    breakpoint()\ndist.barrier()"
    answers = ["interact", "value + 36", "exit()", "interact", END_OF_INPUT, "c"]
    shown, prompts = ranks.run_with_answers(code, *answers)
    assert prompts[1] == prompts[2] == "[rank 1] In : "
    assert "[1] 41" in shown.text
    assert shown.status == "ok"
    request = ranks.send(code)
    ranks.answer_prompt("interact")
    ranks.next_prompt()
    ranks.manager.interrupt_kernel()
    assert "Interrupted on all ranks; all variables are kept." in ranks.collect(request).text
    assert "[0-1] 2" in ranks.run("%%distribute\ndist.barrier()\nworld_size").text


def test_continuing_does_not_change_the_losses(ranks: LiveKernel) -> None:
    assert ranks.run("%%distribute\nexpected = train(4)").status == "ok"
    shown, prompts = ranks.run_with_answers(
        "%%distribute\ntrain(4, stop=lambda step: rank == 1 and step) == expected",
        *["p loss", "c"] * 3,
    )
    assert len(prompts) == 6
    assert "[0-1] True" in shown.text


def test_input_asks_the_user(ranks: LiveKernel) -> None:
    shown, prompts = ranks.run_with_answers(
        "%%distribute\nname = input('Name? ') if rank == 1 else ''\nname", "Ann"
    )
    assert prompts == ["[rank 1] Name? "]
    assert "[1] 'Ann'" in shown.text
    shown, _ = ranks.run_with_answers(
        "%%distribute\nif rank == 1:\n    input('More? ')", END_OF_INPUT
    )
    assert "EOFError" in shown.text


def cell(text: str) -> str:
    """Return the code of a cell without its indentation."""
    return textwrap.dedent(text).strip()


def test_debug_opens_the_debugger_where_the_first_rank_failed(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        def divide(number):
            return 1 / number

        if rank == 1:
            divide(0)
        dist.barrier()
    """
    assert ranks.run(cell(code)).status == "error"
    shown, prompts = ranks.run_with_answers("%debug", "p number", "u", "q")
    assert prompts[0].startswith("[rank 1] In[")
    assert "-> 3     return 1 / number" in shown.text
    assert "\n0\n" in shown.text
    assert shown.status == "ok"
    shown, _ = ranks.run_with_answers("%debug --rank 1", "p number + 5", "q")
    assert "\n5\n" in shown.text
    waited = ranks.run("%debug --rank 0").text  # in the barrier, until it was interrupted
    assert "Rank 0 did not fail in the last cell, but rank 1 did" in waited
    assert "Expected a rank" in ranks.run("%debug --rank two").text
    shown, _ = ranks.run_with_answers("%debug", "p number", "q")  # still that of the cell
    assert "\n0\n" in shown.text
    assert ranks.run("%%distribute\ndist.barrier()").status == "ok"
    assert "did not fail on any rank" in ranks.run("%debug --rank 1").text


def test_debug_is_left_to_ipython_after_errors_of_the_notebook(ranks: LiveKernel) -> None:
    ranks.run("%%distribute\n1 / 0")
    ranks.run("here = 3\n1 / (here - 3)")
    shown, prompts = ranks.run_with_answers("%debug", "p here", "q")
    assert prompts == ["ipdb> ", "ipdb> "]
    assert "3\n" in shown.text


def test_the_next_cell_frees_the_tensors_of_a_failed_one(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        import gc, weakref

        class Iterator:  # that of a DataLoader would wait for each worker during a collection
            def __del__(self):
                freed.extend(phases[-1:])

        freed, phases = [], []
        gc.callbacks.append(lambda phase, _: phases.append(phase))

        def fail():
            global seen
            tensor, iterator = torch.ones(10), Iterator()
            seen = weakref.ref(tensor)
            error = ValueError("failed")  # the frame refers to its own exception
            raise error

        fail()
    """
    assert ranks.run(cell(code)).status == "error"
    text = ranks.run("%%distribute\ngc.callbacks.pop()\n(seen() is None, 'start' in freed)").text
    assert "[0-1] (True, False)" in text


def test_the_debugger_leaves_no_variables(ranks: LiveKernel) -> None:
    code = "%%distribute\nbreakpoint()\ntorch.ones(10) / fail"
    assert ranks.run_with_answers(code, "n", "all c")[0].status == "error"
    code = "%%distribute\nsorted(name for name in globals() if name.startswith('__'))"
    text = ranks.run(code).text
    assert "__name__" in text
    assert not {"__return__", "__exception__", "__pdb_convenience_variables"} & {*text.split("'")}


def test_inspect_evaluates_between_the_steps_of_a_running_cell(ranks: LiveKernel) -> None:
    ranks.run("%%distribute --background\ntrained = train(100_000)")
    asked, shown = "%nbdist inspect type(optimizer).__name__", "[0-1] 'AcceleratedOptimizer'"
    eventually(lambda: shown in ranks.run(asked).text, within_s=30)  # both have begun
    text = ranks.run("%nbdist inspect [step >= first for first in (0, 10**9)]").text
    assert "[0-1] [True, False]" in text  # variables of the function that runs
    assert "Expected a Python expression" in ranks.run("%nbdist inspect x =").text
    text = ranks.run("%nbdist inspect __import__('sys').exit(3)").text
    assert "[0-1] SystemExit: 3" in text
    ranks.run("%nbdist interrupt")
    ranks.run("%nbdist wait")
    text = ranks.run("%nbdist inspect rank / 0").text
    assert "[0-1] ZeroDivisionError: division by zero" in text


def test_python_can_ignore_breakpoints(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        import os
        os.environ["PYTHONBREAKPOINT"] = "0"
        breakpoint()
        del os.environ["PYTHONBREAKPOINT"]
        "went on"
    """
    assert "[0-1] 'went on'" in ranks.run(cell(code)).text


def test_a_background_cell_has_no_prompts(ranks: LiveKernel) -> None:
    ranks.run("%%distribute --background\nbreakpoint()")
    assert "but this cell cannot ask for input" in ranks.run("%nbdist wait").text
    assert "its frames were released" in ranks.run("%debug").text


def test_collectives_do_not_time_out_while_a_user_can_debug(ranks: LiveKernel) -> None:
    look = """
        groups = [dist.group.WORLD, dist.new_group(), dist.new_group(timeout=timedelta(minutes=1))]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        timeouts = [str(backend.options._timeout) for backend in backends]
    """
    ranks.run("%%distribute\nfrom datetime import timedelta")
    ranks.run(f"%%distribute\n{cell(look)}")
    shown = ranks.run("%%distribute\ntimeouts").text
    assert "['7 days, 0:00:00', '7 days, 0:00:00', '0:01:00']" in shown
    ranks.run(f"%%distribute --background\n{cell(look)}")
    ranks.run("%nbdist wait")
    assert "['0:30:00', '0:30:00', '0:01:00']" in ranks.run("%%distribute\ntimeouts").text


# -- what can go wrong at a prompt


@pytest.mark.nightly
@pytest.mark.fault("D14")
def test_a_rank_that_dies_while_it_is_stopped_ends_the_prompt(own_kernel: LiveKernel) -> None:
    own_kernel.run("%%distribute --nproc 2\nimport os, signal")
    pids = own_kernel.run("print([r['pid'] for r in nbdist.session().status()['ranks']])").text
    request = own_kernel.send("%%distribute\nif rank == 1:\n    breakpoint()\n    pass")
    own_kernel.next_prompt()
    os.kill(json.loads(pids)[1], signal.SIGKILL)
    assert "rank 1 ended with signal 9 (SIGKILL)" in own_kernel.collect(request).text
    assert own_kernel.run("%nbdist restart").status == "ok"
    assert "[0-1] 2" in own_kernel.run("%%distribute\nworld_size").text


@pytest.mark.nightly
@pytest.mark.fault("D14")
def test_a_front_end_that_disconnects_at_the_prompt_can_interrupt_later(
    own_kernel: LiveKernel,
) -> None:
    own_kernel.run("%%distribute --nproc 2\nkept = rank")
    own_kernel.send("%%distribute\nif rank == 1:\n    breakpoint()\n    pass")
    own_kernel.next_prompt()
    own_kernel.client.stop_channels()
    own_kernel.client = own_kernel.manager.blocking_client()
    own_kernel.client.start_channels()
    own_kernel.manager.interrupt_kernel()
    check = "%%distribute\ntorch.distributed.barrier()\nkept"
    # A Jupyter kernel drops cells that it gets before the interrupted one has ended.
    eventually(lambda: "[0] 0\n[1] 1" in own_kernel.run(check).text, within_s=30)


@pytest.mark.nightly
def test_a_kernel_restart_at_the_prompt_ends_the_ranks(own_kernel: LiveKernel) -> None:
    own_kernel.run("%%distribute --nproc 2\npass")
    pids = own_kernel.run("print([r['pid'] for r in nbdist.session().status()['ranks']])").text
    own_kernel.send("%%distribute\nbreakpoint()\npass")
    own_kernel.next_prompt()
    own_kernel.manager.restart_kernel(now=True)
    own_kernel.client.wait_for_ready(timeout=60)
    eventually(lambda: not any(map(psutil.pid_exists, json.loads(pids))), within_s=30)
    assert own_kernel.run("%load_ext nbdist").status == "ok"
    assert "[0-1] 2" in own_kernel.run("%%distribute --nproc 2\nworld_size").text


def test_a_data_loader_worker_has_no_debugger(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                breakpoint()
                return index

        list(torch.utils.data.DataLoader(Data(), num_workers=1))
    """
    shown = ranks.run(cell(code))
    assert "in a child process of a rank, such as a DataLoader worker" in shown.text
    assert "[0-1] 2" in ranks.run("%%distribute\nworld_size").text


def test_a_breakpoint_in_a_gradient_hook_stops_there(ranks: LiveKernel) -> None:
    code = """
        %%distribute
        def hook(state, bucket):
            if rank == 1:
                breakpoint()
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / world_size)

        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        wrapped.register_comm_hook(None, hook)
        wrapped(torch.ones(1, 1)).sum().backward()
        wrapped.module.weight.grad.item()
    """
    shown, prompts = ranks.run_with_answers(cell(code), "p bucket.index()", "c")
    assert prompts[0].startswith("[rank 1] In[")
    assert "[0-1] 1.0" in shown.text


# -- all engines


@pytest.mark.nightly
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_ten_continues_do_not_change_the_losses(
    own_kernel: LiveKernel, backend: str, nproc: int
) -> None:
    own_kernel.run(f"%%distribute --nproc {nproc} --backend {backend}\n{TRAINING}")
    assert own_kernel.run("%%distribute\nexpected = train(11)").status == "ok"
    shown, prompts = own_kernel.run_with_answers(
        "%%distribute\nassert train(11, stop=lambda step: rank == 1 and step) == expected",
        *["c"] * 10,
    )
    assert len(prompts) == 10
    assert shown.status == "ok", shown.text


COMMANDS = [
    "p step",
    "n",
    "s",
    "u",
    "",
    "c",
    "rank 0",
    "rank 1",
    "all p step",
    "all n",
    "all c",
    "q",
]


def random_session(kernel: LiveKernel, chooser: random.Random) -> None:
    """Debug a training with random commands, and interrupt it at most once."""
    stops = {(rank, chooser.randrange(6)) for rank in (0, 1) for _ in range(2)}
    request = kernel.client.execute(
        f"%%distribute\ntrain(6, stop=lambda step: (rank, step) in {stops})", stop_on_error=False
    )  # a cell that is stopped does not cancel the next one
    interrupts = chooser.randrange(2)
    for _ in range(2_000):
        if kernel.client.shell_channel.msg_ready():
            reply = kernel.client.get_shell_msg(timeout=1)
            if reply["parent_header"]["msg_id"] == request:
                return
        if interrupts and chooser.random() < 0.05:
            interrupts -= 1
            kernel.manager.interrupt_kernel()
        try:
            kernel.client.get_stdin_msg(timeout=0.05)
        except queue.Empty:
            continue
        kernel.client.input(chooser.choice(COMMANDS))
    pytest.fail(f"the cell with stops at {stops} does not end")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(200))
def test_random_commands_leave_no_rank_stuck(ranks: LiveKernel, seed: int) -> None:
    random_session(ranks, random.Random(seed))  # noqa: S311 - repeatable
    check = "%%distribute\ntotal = torch.ones(1)\ndist.all_reduce(total)\ntotal.item()"
    assert "[0-1] 2.0" in ranks.run(check).text
