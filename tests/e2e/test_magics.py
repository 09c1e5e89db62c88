"""The magics in a real kernel, as a front end sees them."""

from __future__ import annotations

import json
import venv
from typing import TYPE_CHECKING

import pytest

from tests.unit.test_json_documents import fields_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live_kernel import LiveKernel


def test_first_cell_says_what_it_starts(notebook: LiveKernel) -> None:
    shown = notebook.run("%%distribute --backend ddp -n 2\nprint('hello from', rank)")
    assert shown.status == "ok"
    assert "2 CPU ranks" in shown.text
    assert "ready in" in shown.text
    assert "[0] hello from 0" in shown.text
    assert "[1] hello from 1" in shown.text


def test_last_expression_is_merged(notebook: LiveKernel) -> None:
    assert "[0-1] 2" in notebook.run("%%distribute\nworld_size").text
    assert not notebook.run("%%distribute\nworld_size;  # a semicolon hides it").outputs


def test_a_comment_in_the_first_line_distributes_the_cell(notebook: LiveKernel) -> None:
    notebook.run("last = 1")
    shown = notebook.run("\n#| distribute --ranks {last}\nprint('rank', rank)\n1 / 0")
    assert "rank 1\n" in shown.text
    assert "rank 0" not in shown.text
    assert "----> 3 1 / 0" in shown.text  # as in a cell that begins with %%distribute
    assert "rank" not in notebook.run("#| distributed by hand\nprint('here')").text


def test_figure(notebook: LiveKernel) -> None:
    shown = notebook.run("%%distribute\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    pictures = [output for output in shown.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1  # equal on both ranks


def test_update_display(notebook: LiveKernel) -> None:
    shown = notebook.run(
        "%%distribute --ranks 1\nh = display('before', display_id=True)\nh.update('after')"
    )
    assert "after" in shown.text
    assert "before" not in shown.text


def test_a_command_of_the_notebook_is_refused_on_ranks(notebook: LiveKernel) -> None:
    shown = notebook.run("%%distribute\nx = 1\n%nbdist save best")
    assert shown.status == "error"
    assert "%nbdist save best is a command of the notebook. Run it in a cell" in shown.text


def test_tab_completes_names_of_rank_0_in_its_cells(notebook: LiveKernel) -> None:
    def complete(code: str) -> list[str]:
        reply = notebook.client.complete(code, reply=True, timeout=30)["content"]
        return [code[: reply["cursor_start"]] + match for match in reply["matches"]]

    notebook.run("%%distribute\nnames_of_rank = ['a']")
    cell = "%%distribute --ranks 0\nif rank == 0:\n    print(names_of"
    assert complete(cell) == [f"{cell}_rank"]
    cell = "#| distribute\nnames_of_rank.app"
    assert complete(cell) == [f"{cell}end"]
    assert complete("names_of") == []


def test_clear_output_replaces_what_was_shown(notebook: LiveKernel) -> None:
    shown = notebook.run(
        "%%distribute\nfrom IPython.display import clear_output\n"
        "for epoch in range(3):\n    clear_output(wait=True)\n    print('epoch', epoch)"
    )
    assert shown.status == "ok"
    assert [output["kind"] for output in shown.outputs[-2:]] == ["clear_output", "stream"]
    assert "[0-1] epoch 2" in shown.text


def test_error_marks_the_cell_failed(notebook: LiveKernel) -> None:
    shown = notebook.run("%%distribute\nx = 1\nraise ValueError('bad batch')")
    assert shown.status == "error"
    assert shown.error["ename"] == "CellError"
    assert "ValueError: bad batch" in shown.text
    assert "line 3" in shown.text  # the cell's own count, the magic being line 1
    assert f"In[{shown.count}]" in shown.text
    assert "ranks 0-1" in shown.text
    assert "nbdist/" not in shown.text


def test_syntax_error_is_said_once(notebook: LiveKernel) -> None:
    shown = notebook.run("%%distribute\nx = = 1")
    assert shown.status == "error"
    assert shown.text.count("SyntaxError:") == 1
    assert f"Cell In[{shown.count}], line 2" in shown.text
    assert "magics.py" not in shown.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--auto --backend ddp", "Leave one of them out"),
        ("--nonsense", "has no option --nonsense"),
        ("-n two", "invalid int"),
        ("--ranks 0,7", "world_size 2"),
        ("--push nothing_here", "no variable"),
        ("--background --pull x", "%nbdist wait"),
        ("--deepspeed-config /nowhere.json", "nowhere.json"),
    ],
)
def test_bad_input_is_one_sentence(notebook: LiveKernel, line: str, says: str) -> None:
    shown = notebook.run(f"%%distribute {line}\npass")
    assert shown.status == "error"
    assert says in shown.text
    assert "Traceback" not in shown.text
    assert notebook.run("%%distribute\nrank").status == "ok"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--on ray://127.0.0.1:1", "--on ray"),
        ("--on slurm --nodes 2 -n 3", "cannot be spread evenly"),
        ("--on local --nodes 2 -n 2", "can be used with --on ray or --on slurm"),
        ("--fresh --push nothing_here", "no variable nothing_here"),
    ],
)
def test_a_place_that_cannot_be_leaves_the_session(
    notebook: LiveKernel, options: str, says: str
) -> None:
    assert notebook.run("%%distribute\nkept = [rank] * 3").status == "ok"
    shown = notebook.run(f"%%distribute {options}\npass")
    assert shown.status == "error"
    assert says in shown.text
    assert "are lost" not in shown.text
    assert "[1] [1, 1, 1]" in notebook.run("%%distribute\nkept").text


def test_push_and_pull(notebook: LiveKernel) -> None:
    notebook.run("a, b = [1, 2], 'text'")
    shown = notebook.run("%%distribute --push a,b --pull c,d\nc = a + [rank]; d = b.upper()")
    assert shown.status == "ok"
    assert "([1, 2, 0], 'TEXT')" in notebook.run("c, d").text


def test_send_binds_in_the_notebook(notebook: LiveKernel) -> None:
    notebook.run("%%distribute --ranks 1\nsend('note', {'from': rank})")
    assert "{'from': 1}" in notebook.run("note").text


def test_capture(notebook: LiveKernel) -> None:
    notebook.run("%%capture seen\nget_ipython().run_cell_magic('distribute', '', 'print(rank)')")
    assert "[0] 0" in notebook.run("print(seen.stdout)").text


def test_background(notebook: LiveKernel) -> None:
    cell = "%%distribute --background\nimport time\nwhile True: time.sleep(0.01)"
    assert notebook.run(cell).status == "ok"
    busy = notebook.run("%%distribute\n1")
    assert busy.status == "error"
    assert "%nbdist wait" in busy.text
    notebook.run("%nbdist interrupt")
    assert "KeyboardInterrupt" in notebook.run("%nbdist wait").text
    assert notebook.run("%%distribute\nrank").status == "ok"


def test_widget_progress_bar_reaches_the_front_end(notebook: LiveKernel) -> None:
    shown = notebook.run(
        "%%distribute --ranks 0\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass"
    )
    assert shown.status == "ok"
    assert any(output["kind"] == "comm_open" for output in shown.outputs)
    views = [
        o for o in shown.outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})
    ]
    assert len(views) == 1


def test_another_backend_switches_and_says_so(notebook: LiveKernel) -> None:
    notebook.run("%%distribute\nkept = 1")
    shown = notebook.run("%%distribute --backend fsdp\nkept, repr(accelerator)[:19]")
    assert "2 CPU ranks (no GPU found): ddp -> fsdp2 in" in shown.text
    assert "[0-1] (1, '<accelerator: FSDP2')" in shown.text
    shown = notebook.run("%nbdist switch --activation-checkpointing")
    assert "nbdist: fsdp2 -> fsdp2, activation checkpointing in" in shown.text
    notebook.run("%nbdist switch --no-activation-checkpointing")


def test_a_config_in_the_line_reaches_the_engine(notebook: LiveKernel) -> None:
    notebook.run(
        """%%distribute --backend fsdp2 --fsdp-config '{"reshard_after_forward": false}'\n"""
        "blocks = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])\n"
        "model, optimizer = accelerator.prepare(blocks, torch.optim.SGD(blocks.parameters()))\n"
        "model(torch.ones(2, 512));"
    )
    shown = notebook.run(
        "%%distribute\n"
        "units = [type(one).__name__ for one in model]\n"
        "kept = {type(one.weight.data).__name__ for one in model}  # else DTensor\n"
        "accelerator.state.fsdp_plugin.reshard_after_forward, kept, units[0]"
    )
    assert "(False, {'Tensor'}, 'FSDPLinear')" in shown.text


def test_options_can_be_taken_back(notebook: LiveKernel) -> None:
    assert "clip 0.5" in notebook.run("%%distribute --clip 0.5\n1").text
    assert "clip" not in notebook.run("%nbdist status").text.replace("clip 0.5", "")
    notebook.run("%%distribute --clip none\n1")
    assert "clip" not in notebook.run("%nbdist status").text


def test_a_question_mark_answers(notebook: LiveKernel) -> None:
    assert "number of items" in notebook.run("%%distribute\nlen?").text


def test_an_error_without_a_traceback_has_its_text(notebook: LiveKernel) -> None:
    assert "not found" in "".join(notebook.run("%%distribute\n%nope").error["traceback"])


def test_fresh_takes_new_ranks(notebook: LiveKernel) -> None:
    notebook.run("%%distribute\nlost = 1")
    assert "[0-1] False" in notebook.run("%%distribute --fresh\n'lost' in globals()").text


def test_new_ranks_that_fail_to_start_end_no_ranks(notebook: LiveKernel, tmp_path: Path) -> None:
    notebook.run("%%distribute\nkept = 1")
    venv.create(tmp_path)
    assert "torch" in notebook.run(f"%%distribute --python {tmp_path}\n1").error["evalue"]
    assert str(tmp_path) not in notebook.run("%nbdist doctor").text
    srun = tmp_path / "bin" / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: invalid partition' >&2\nexit 1\n")
    srun.chmod(0o755)
    notebook.run(f"import os\nos.environ['PATH'] = '{srun.parent}:' + os.environ['PATH']")
    refused = notebook.run("%%distribute --on slurm -n 2\n1").error["evalue"]
    assert "Slurm rejected the request: invalid partition" in refused
    assert "[0-1] 1" in notebook.run("%%distribute\nkept").text


def test_commands(notebook: LiveKernel) -> None:
    assert "rank 1: pid" in notebook.run("%nbdist status").text
    assert "interrupt" in notebook.run("%nbdist").text
    assert "--steps" in notebook.run("%nbdist profile -h").text
    assert "--face" in notebook.run("%nbdist panel -h").text
    shown = notebook.run("%nbdist panel --face html")
    assert any("text/html" in output.get("data", {}) for output in shown.outputs)
    assert "rank 1 (ready" in notebook.run("%nbdist panel --face text").text
    assert (
        "Unknown panel format"
        in notebook.run("import nbdist; nbdist.session().panel('video')").text
    )
    for line in ("%nbdist switch -h", "%nbdist switch"):
        shown = notebook.run(line).text
        assert shown.lstrip().startswith("%nbdist switch [-h]")
        assert "--reset-optimizer" in shown
    assert "torch" in notebook.run("%nbdist doctor").text
    assert '"findings"' in notebook.run("%nbdist doctor --json").text
    assert "--json" in notebook.run("%nbdist doctor -h").text
    wrong = notebook.run("%nbdist fly")
    assert wrong.status == "error"
    assert "status" in wrong.text


def test_a_plan_is_shown_and_a_bad_line_is_one_sentence(notebook: LiveKernel) -> None:
    shown = notebook.run("%nbdist plan 7b --devices 8xA100-80GB,nvlink --seq-len 1024")
    assert shown.status == "ok"
    assert "fastest that fits" in shown.text
    assert any("text/html" in output.get("data", {}) for output in shown.outputs)
    wrong = notebook.run("%nbdist plan 7b --devices 8xPotato")
    assert wrong.status == "error"
    assert "Potato" in wrong.text


def test_help_is_complete(notebook: LiveKernel) -> None:
    reply = notebook.client.inspect("%%distribute", reply=True, timeout=10)
    text = reply["content"]["data"]["text/plain"]
    options = ("--backend", "--precision", "--offload-params", "--push", "--background")
    for option in (*options, "--replicate-across"):
        assert option in text
    assert "%nbdist COMMAND" in notebook.run("%nbdist --help").text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%distribute --back", {"--background", "--backend"}),
        ("%%distribute --backend ze", {"zero1", "zero2", "zero3"}),
        ("%%distribute --precision ", {"no", "fp16", "bf16", "fp8"}),
        ("%nbdist sta", {"status"}),
        ("%nbdist profile --st", {"--steps"}),
        ("%%distribute --offload n", {"none", "nvme:"}),
        ("%%distribute --replicate-across n", {"none", "nodes"}),
        ("%nbdist switch z", {"zero1", "zero2", "zero3"}),
        ("%nbdist switch fsdp --repl", {"--replicate-across"}),
        ("%nbdist plan 7b --dev", {"--devices"}),
        ("%nbdist plan 7b --precision f", {"fp16", "fp8"}),
    ],
)
def test_completion(notebook: LiveKernel, line: str, expected: set[str]) -> None:
    reply = notebook.client.complete(line, reply=True, timeout=10)
    assert set(reply["content"]["matches"]) == expected


def test_reload_keeps_the_ranks(notebook: LiveKernel) -> None:
    notebook.run("%%distribute\nkept = 41")
    assert notebook.run("%reload_ext nbdist").status == "ok"
    assert "[0-1] 42" in notebook.run("%%distribute\nkept + 1").text


def test_bad_config_does_not_break_the_next_load(notebook: LiveKernel) -> None:
    assert "horovod" in notebook.run("%config NbDist.backend = 'horovod'").text
    shown = notebook.run("%reload_ext nbdist")
    assert shown.status == "ok"
    assert "ignoring" in shown.text
    assert notebook.run("%config NbDist.backend = 'zero1'").status == "ok"


def test_stacks_of_all_ranks_on_request(notebook: LiveKernel) -> None:
    notebook.run("%%distribute -n 2\nrank")
    shown = notebook.run("%nbdist log --stacks").text
    assert "-- rank 0 --\nThread MainThread:" in shown
    assert "-- rank 1 --\nThread MainThread:" in shown


def test_status_as_json_is_one_document(notebook: LiveKernel) -> None:
    notebook.run("%%distribute\nreport(loss=0.5)")
    document = json.loads(notebook.run("%nbdist status --json").text)
    assert document["schema"] == "nbdist.status/1"
    assert (document["state"], document["world_size"]) == ("ready", 2)
    assert [rank["alive"] for rank in document["ranks"]] == [True, True]
    assert set(document) - {"schema", "nbdist"} == fields_of("status") - {"schema", "nbdist"}


LOOP = """%%distribute
from tqdm import tqdm
for _ in tqdm(range(3), desc="bar"): pass
print("rank", rank)
world_size
"""


def test_replay_shows_the_output_of_the_last_cell_again(notebook: LiveKernel) -> None:
    shown, again = notebook.run(LOOP), notebook.run("%nbdist replay")
    for text in (shown.text, again.text):
        assert "rank 0" in text
        assert "rank 1" in text
        assert "[0-1] 2" in text
        assert "bar: 100%" in text


def test_replay_shows_the_error_again(notebook: LiveKernel) -> None:
    notebook.run("%%distribute\nprint('before')\nraise ValueError('bad batch')")
    again = notebook.run("%nbdist replay")
    assert again.status == "ok"
    assert "before" in again.text
    assert "ValueError: bad batch" in again.text


@pytest.mark.parametrize("option", ["", " --background"])
def test_replay_shows_an_interrupt_as_one_line(notebook: LiveKernel, option: str) -> None:
    loop = "accelerator.wait_for_everyone()\nif rank == 0: print('begun')\nwhile True: pass"
    request = notebook.send(f"%%distribute{option}\n{loop}")
    if option:
        notebook.below(request, until="begun")
        notebook.run("%nbdist interrupt")
        notebook.run("%nbdist wait")
    else:
        notebook.collect(request, until="begun")
        notebook.manager.interrupt_kernel()
        notebook.collect(request)
    lines = notebook.run("%nbdist replay").text.splitlines()
    assert lines == ["[0] begun", "KeyboardInterrupt: Interrupted on ranks 0-1"]


def test_replay_of_a_background_cell_continues_below(notebook: LiveKernel) -> None:
    """With the second part of its output."""
    notebook.run("import tempfile; flag = tempfile.mktemp()")
    notebook.run(
        "%%distribute --background --push flag\nimport time\nfrom pathlib import Path\n"
        "print('first part')\nwhile not Path(flag).exists(): time.sleep(0.01)\nprint('second part')"
    )
    shown = notebook.run(
        "import time\nfrom pathlib import Path\n%nbdist replay\nPath(flag).touch()\n%nbdist wait"
    )
    assert "second part" in shown.text


def test_unload_removes_everything(notebook: LiveKernel) -> None:
    notebook.run("nbdist.session().stop()")
    assert notebook.run("%unload_ext nbdist").status == "ok"
    shown = notebook.run("%%distribute\n1")
    assert shown.status == "error"
    assert "not found" in shown.text
    reply = notebook.client.complete("%%distribute --back", reply=True, timeout=10)
    assert "--backend" not in reply["content"]["matches"]
