"""The panel in a real kernel; its page is simulated by the messages that a browser would send."""

from __future__ import annotations

import queue
import struct
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nbdist.panel import commands
from tests.live_kernel import DEADLINE_S, LiveKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """%%distribute -n 2
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
"""
TRAIN = """%%distribute
for _ in range(5):
    ids = torch.randint(0, 64, (2, 16), device=device)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
print("<b>trained</b>")
"""


TRAIN_NOTHING = "%%distribute\nreport(loss=1.0)"


class Page:
    """What a browser's page does with the panel: sends messages, and keeps what comes."""

    def __init__(self, kernel: LiveKernel) -> None:
        self.kernel = kernel
        self.model = ""
        self.display = ""
        self.messages: list[tuple[dict[str, Any], list[Any]]] = []
        self.frozen: dict[str, Any] = {}
        self.lines: list[str] = []
        """What is displayed below cells, as text."""
        self.state: dict[str, Any] = {}
        self.rows: dict[str, dict[float, float]] = {}
        self.statuses: dict[str, str] = {}
        self.methods: set[str] = set()
        """Of messages to the page, as ipywidgets has them."""
        request = kernel.send("%nbdist panel")
        self.until(lambda: self.model and request in self.statuses)
        assert self.statuses[request] == "ok"
        self.send({"kind": "hello"})
        self.until(lambda: self.state)

    def send(self, content: dict[str, Any], *, subshell: str | None = None) -> None:
        """Send a message to the panel; JupyterLab does so on a subshell."""
        self.post({"method": "custom", "content": content}, subshell=subshell)

    def post(self, data: dict[str, Any], *, subshell: str | None = None) -> None:
        self.kernel.send_comm(self.model, data, subshell=subshell)

    def command(self, name: str, /, subshell: str | None = None, **arguments: Any) -> str:
        """Press a button; returns the id of the command."""
        identity = f"{name}-{len(self.messages)}"
        message = {"kind": "command", "id": identity, "name": name, "arguments": arguments}
        self.send(message, subshell=subshell)
        return identity

    def answer(self, identity: str) -> dict[str, Any]:
        def found() -> dict[str, Any]:
            all_of_them = [m for m, _ in self.messages if m.get("id") == identity]
            return all_of_them[-1] if all_of_them else {}

        self.until(found)
        return found()

    def cell(self, code: str) -> str:
        request = self.kernel.send(code)
        self.until(lambda: request in self.statuses)
        return self.statuses[request]

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline, self.state
            self._read()

    def _read(self) -> None:
        while True:
            try:
                reply = self.kernel.client.get_shell_msg(timeout=0)
            except queue.Empty:
                break
            self.statuses[reply["parent_header"]["msg_id"]] = reply["content"].get("status", "")
        try:
            message = self.kernel.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            return
        content = message["content"]
        match message["msg_type"]:
            case "display_data" if WIDGET in content["data"]:
                self.model = content["data"][WIDGET]["model_id"]
                self.display = content["transient"]["display_id"]
                self.shown = content["data"]
            case "display_data":
                self.lines.append(content["data"].get("text/plain", ""))
            case "update_display_data" if content["transient"]["display_id"] == self.display:
                self.frozen = content["data"]
            case "comm_msg" if content["comm_id"] == self.model:
                self.methods.add(content["data"].get("method"))
                if content["data"].get("method") == "custom":
                    self._take(content["data"]["content"], message["buffers"])

    def _take(self, message: dict[str, Any], buffers: list[Any]) -> None:
        self.messages.append((message, buffers))
        if message["kind"] == "reset":
            self.state, self.rows = message["state"], {}
        elif message["kind"] == "state":
            self.state.update(message["changed"])
        if "series" in message:
            numbers = iter(struct.iter_unpack("<ddd", bytes(buffers[0])))
            for one in message["series"]:
                points = self.rows.setdefault(one["name"], {})
                for _ in range(one["points"]):
                    step, _, value = next(numbers)
                    points[step] = value
            assert next(numbers, None) is None


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A panel beside two trained CPU ranks."""
    folder: Path = tmp_path_factory.mktemp("panel")
    script = folder / "panel.js"
    script.write_text("export default () => ({ render() {} });")
    script.with_suffix(".css").write_text("")
    # plans by what is measured here are for other tests
    with LiveKernel(folder, XDG_CACHE_HOME=str(folder / "cache")) as kernel:
        assert kernel.run("%load_ext nbdist").status == "ok"
        # The bundle is built by Node, which these tests do without.
        kernel.run(
            "import pathlib, nbdist.panel.protocol as bundled\n"
            f"bundled.SCRIPT, bundled.STYLE = pathlib.Path({str(script)!r}),"
            f" pathlib.Path({str(script.with_suffix('.css'))!r})"
        )
        assert kernel.run(SETUP).status == "ok"
        yield Page(kernel)


def test_a_displayed_panel_says_the_same_without_widgets(page: Page) -> None:
    assert "ddp" in page.shown["text/plain"]
    assert "2 CPU ranks" in page.shown["text/html"]
    assert "<script" not in page.shown["text/html"]


def test_points_and_states_arrive(page: Page) -> None:
    assert page.cell(TRAIN) == "ok"
    page.until(lambda: len(page.rows.get("loss", {})) == 5)
    page.until(lambda: "trained" in page.state["ranks"][1]["last_line"])
    assert [rank["state"] for rank in page.state["ranks"]] == ["ready", "ready"]
    page.until(lambda: page.state["devices"][0]["used_bytes"])
    mine = page.kernel.run(
        "nbdist_losses = __import__('nbdist').session().metrics['loss']\nprint(nbdist_losses)"
    ).text
    assert [f"{value:.6f}" for value in page.rows["loss"].values()] == [
        f"{float(value):.6f}" for value in mine.strip().strip("[]").split(",")
    ]


def test_the_plan_appears_by_itself(page: Page) -> None:
    page.until(lambda: page.state["strategies"]["rows"])
    rows = page.state["strategies"]["rows"]
    assert [row["backend"] for row in rows if row["current"]] == ["ddp"]
    assert sum(row["recommended"] for row in rows) == 1
    assert {"ddp", "fsdp2", "zero3"} <= {row["backend"] for row in rows}
    assert page.state["devices"][0]["predicted"]


def test_what_a_long_cell_prepares_is_planned_while_it_runs(page: Page) -> None:
    def parameters() -> int:
        parts = page.state["devices"][0]["predicted"]
        return sum(one["bytes"] for one in parts if one["part"] == "parameters")

    before = parameters()
    assert before
    wider = SETUP.replace(" -n 2", " --background").replace("hidden_size=32", "hidden_size=512")
    assert page.cell(f"{wider}\nimport time; time.sleep(60)") == "ok"
    page.until(lambda: parameters() > 10 * before)
    assert page.state["header"]["state"] == "running"
    assert page.answer(page.command("interrupt"))["ok"]
    page.until(lambda: page.state["header"]["state"] == "interrupted")
    assert page.cell(SETUP) == "ok"


@pytest.mark.fault("G4")
def test_not_more_than_five_messages_a_second(page: Page) -> None:
    before = len(page.messages)
    begin = time.monotonic()
    page.cell(
        "%%distribute\nimport time\nend = time.time() + 4\n"
        "while time.time() < end:\n    report(fast=1.0)\n    time.sleep(0.001)"
    )
    kinds = [message["kind"] for message, _ in page.messages[before:]]
    assert len(kinds) / (time.monotonic() - begin) <= 5.5
    assert "points" in kinds


def test_save_from_the_panel(page: Page) -> None:
    answer = page.answer(page.command("save", name="from-panel"))
    assert answer["ok"], answer
    page.until(
        lambda: [
            one
            for one in page.state["checkpoints"]
            if one["name"] == "from-panel" and one["state"] == "done"
        ]
    )
    page.until(lambda: [mark for mark in page.state["marks"] if mark["kind"] == "save"])
    again = page.answer(page.command("save", name="from-panel"))
    assert not again["ok"]
    assert "overwrite" in again["text"]


@pytest.mark.fault("G2")
def test_no_page_can_change_the_panel_of_the_others(page: Page) -> None:
    for state in (
        {"_esm": "throw 1", "_css": "* { color: red }", "_view_name": "x"},
        "no state",
        5,
    ):
        page.post({"method": "update", "state": state, "buffer_paths": []})
    page.send({"kind": "command", "id": "behind them", "name": "stop", "arguments": {}})
    page.answer("behind them")
    found = page.kernel.run(
        "import nbdist; _widget = nbdist.session().panel_model.panel._widget\n"
        "print(_widget._esm[:14], _widget._css == '', _widget._view_name)"
    )
    assert found.text.strip() == "export default True AnyView"
    assert page.methods == {"custom"}  # nothing of it was passed on


@pytest.mark.fault("G5")
def test_an_internal_error_is_reported_and_the_next_command_runs(page: Page) -> None:
    page.kernel.run("import nbdist\nnbdist.session().save = lambda **_: 1 / 0")
    answer = page.answer(page.command("save", name="broken"))
    assert (answer["ok"], answer["text"]) == (False, "ZeroDivisionError: division by zero")
    page.until(lambda: page.state["notice"] and "division" in page.state["notice"]["text"])
    page.kernel.run("del nbdist.session().save")
    assert "Error" not in page.answer(page.command("plan"))["text"]
    assert page.cell(TRAIN_NOTHING) == "ok"


def test_an_export_into_a_folder_with_files_can_replace_them(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    refused = page.answer(page.command("export", folder=str(folder)))
    assert (refused["ok"], refused["can_replace"]) == (False, True)
    assert page.answer(page.command("export", folder=str(folder), overwrite=True))["ok"]
    assert (folder / "model.safetensors").is_file()
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.nightly
def test_a_plan_for_another_number_of_ranks_uses_the_earlier_batch(page: Page) -> None:
    assert page.cell(TRAIN) == "ok"
    for nproc in (1, 2):
        assert page.answer(page.command("switch", nproc=nproc))["ok"]
        words = f"{nproc} CPU rank"
        page.until(lambda words=words: words in page.state["strategies"]["note"])
        assert "micro-batch 2 x 16" in page.state["strategies"]["note"]
        assert [row["backend"] for row in page.state["strategies"]["rows"] if row["current"]]


def test_a_command_waits_for_the_running_cell(page: Page, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = (
        "%%distribute --background\nimport threading\nfrom pathlib import Path\n"
        f"while not Path({str(go)!r}).exists(): threading.Event().wait(0.01)"
    )
    assert page.cell(waiting) == "ok"
    page.until(lambda: page.state["header"]["state"] == "running")
    identity = page.command("switch", backend="zero1")
    page.until(lambda: [one for one in page.state["queue"] if one["id"] == identity])
    assert page.state["header"]["state"] == "running"
    unwanted = page.command("save", name="unwanted")
    page.until(lambda: [one for one in page.state["queue"] if one["id"] == unwanted])
    assert page.answer(page.command("cancel", command=unwanted))["ok"]
    page.until(lambda: [one["id"] for one in page.state["queue"]] == [identity])
    go.touch()
    page.until(lambda: page.state["header"]["state"] == "switching")
    assert page.answer(identity)["ok"]
    page.until(lambda: page.state["header"]["backend"] == "zero1")
    assert page.state["queue"] == []
    page.until(lambda: [mark for mark in page.state["marks"] if mark["kind"] == "switch"])
    page.until(lambda: [r for r in page.state["strategies"]["rows"] if r["current"]])
    assert page.cell(TRAIN) == "ok"


def test_interrupt_does_not_wait_and_says_where_ranks_are(page: Page) -> None:
    page.cell(
        "%%distribute --background\nimport time\nif rank == 0:\n    time.sleep(60)\n"
        "accelerator.wait_for_everyone()"
    )
    page.until(lambda: "sleep(60)" in page.state["ranks"][0]["current_line"])
    page.until(lambda: "barrier" in page.state["ranks"][1]["current_line"])
    assert page.state["ranks"][1]["state"] == "waiting"
    page.command("interrupt")
    page.until(lambda: page.state["ranks"][0]["state"] == "ready")
    page.command("restart")
    page.until(lambda: page.state["strategies"]["rows"] == [])
    page.until(lambda: page.state["header"]["state"] == "ready")
    page.until(lambda: [mark["kind"] for mark in page.state["marks"]] == ["restart"])
    assert page.rows == {}


def test_buttons_work_while_a_cell_blocks(page: Page) -> None:
    subshell = page.kernel.subshell()
    blocked = page.kernel.send("%%distribute\nx = 1\nimport time\ntime.sleep(80)")
    page.until(lambda: page.state["header"]["state"] == "running")
    page.until(lambda: "sleep(80)" in page.state["ranks"][0]["current_line"])
    assert page.answer(page.command("interrupt", subshell))["ok"]
    page.until(lambda: blocked in page.statuses)
    assert page.statuses[blocked] == "error"
    page.until(lambda: page.state["header"]["state"] == "interrupted")
    assert page.cell("%%distribute\nassert x == 1") == "ok"


def test_a_restart_ends_a_cell_that_blocks(page: Page) -> None:
    subshell = page.kernel.subshell()
    stuck = page.kernel.send("%%distribute\nimport time\ntime.sleep(80)")
    # an earlier state may say "running" of the last cell
    page.until(lambda: "sleep(80)" in page.state["ranks"][0]["current_line"])
    identity = page.command("restart", subshell)
    page.until(lambda: stuck in page.statuses)
    assert page.statuses[stuck] == "error"
    assert page.answer(identity)["ok"]
    page.until(lambda: page.state["header"]["state"] == "ready")


def test_the_notebooks_own_stop_leaves_a_panel_that_works(page: Page) -> None:
    """The REST interrupt of a page whose messages nobody reads is this signal."""
    blocked = page.kernel.send("%%distribute\ny = 2\nimport time\ntime.sleep(80)")
    page.until(lambda: "sleep(80)" in page.state["ranks"][1]["current_line"])
    page.kernel.manager.interrupt_kernel()
    page.until(lambda: blocked in page.statuses)
    page.until(lambda: page.state["header"]["state"] == "interrupted")
    page.until(lambda: page.answer(page.command("plan"))["id"])
    assert page.cell("%%distribute\nassert y == 2") == "ok"


def test_a_session_shows_itself_as_its_panel(page: Page) -> None:
    model = page.model
    assert page.cell("import nbdist; nbdist.session()") == "ok"
    assert page.model == model  # one panel, seen in two places
    assert page.cell(TRAIN_NOTHING) == "ok"
    page.until(lambda: page.state["header"]["state"] == "ready")


def test_a_dead_rank_is_named_and_new_ones_are_a_button_away(page: Page) -> None:
    assert page.cell("%%distribute\nimport os, signal\nif rank == 1:\n"
                     "    os.kill(os.getpid(), signal.SIGKILL)\n"
                     "accelerator.wait_for_everyone()") == "error"  # fmt: skip
    page.until(lambda: page.state["header"]["state"] == "dead")
    assert "rank 1" in page.state["header"]["description"]
    assert {rank["state"] for rank in page.state["ranks"]} == {"dead"}
    refused = page.answer(page.command("save", name="dead"))
    assert not refused["ok"]
    assert "rank 1" in refused["text"]
    assert page.answer(page.command("restart"))["ok"]
    page.until(lambda: page.state["header"]["state"] == "ready")
    page.until(lambda: [rank["state"] for rank in page.state["ranks"]] == ["ready", "ready"])


def test_ranks_that_hang_in_a_command_can_be_restarted(page: Page) -> None:
    page.until(lambda: [rank["pid"] for rank in page.state["ranks"] if rank["pid"]])
    psutil.Process(page.state["ranks"][1]["pid"]).suspend()
    saving = page.command("save", name="hangs")
    page.until(lambda: page.state["header"]["state"] == "saving")
    stopped = page.answer(page.command("interrupt"))
    assert "Interrupting" in stopped["text"]
    since = time.monotonic()
    page.until(lambda: time.monotonic() - since > commands.RESTART_TIMEOUT_S)
    restart = page.command("restart")
    assert not page.answer(saving)["ok"]
    assert page.answer(restart)["ok"]
    page.until(lambda: page.state["header"]["state"] == "ready")
    assert page.cell(TRAIN_NOTHING) == "ok"


def test_a_restart_also_ends_a_cell_that_waits_for_a_command(page: Page) -> None:
    page.until(lambda: [rank["pid"] for rank in page.state["ranks"] if rank["pid"]])
    psutil.Process(page.state["ranks"][1]["pid"]).suspend()
    subshell = page.kernel.subshell()
    saving = page.command("save", subshell, name="hangs")
    page.until(lambda: page.state["header"]["state"] == "saving")
    waits = page.kernel.send("%%distribute\nimport time\ntime.sleep(80)")
    page.until(
        lambda: [line for line in page.lines if "waiting for a command of the panel" in line]
    )
    restart = page.command("restart", subshell)
    page.until(lambda: waits in page.statuses)
    assert page.statuses[waits] == "error"
    assert not page.answer(saving)["ok"]
    assert page.answer(restart)["ok"]
    page.until(lambda: page.state["header"]["state"] == "ready")
    assert page.cell(TRAIN_NOTHING) == "ok"


@pytest.mark.nightly
def test_a_cell_that_blocks_is_profiled_and_commands_for_later_wait(page: Page) -> None:
    assert page.cell(SETUP) == "ok"  # the ranks are new ones by now
    subshell = page.kernel.subshell()
    slow = TRAIN.replace("range(5)", "range(300)").replace("report", "time.sleep(0.3); report")
    asked = page.kernel.send(slow.replace("\n", "\nimport time\n", 1))
    page.until(lambda: "sleep(0.3)" in page.state["ranks"][0]["current_line"])
    later = page.command("plan", subshell)
    answer = page.answer(page.command("profile", subshell))
    assert answer["ok"], answer
    page.until(lambda: "profiling: step" in (page.state["progress"] or {}).get("text", ""))
    assert "in progress" in page.state["profile"]["unavailable_reason"]
    again = page.answer(page.command("profile", subshell))
    assert (again["ok"], "in progress" in again["text"]) == (False, True)
    page.until(lambda: page.state["profile"]["verdict"])
    profile = page.state["profile"]
    assert [one["rank"] for one in profile["ranks"]] == [0, 1]
    for one in profile["ranks"]:
        whole = sum(part["seconds"] for part in one["parts"])
        assert whole == pytest.approx(one["step_s"], rel=0.03)
    assert page.state["header"]["state"] == "running"
    assert [one["text"] for one in page.state["queue"]] == ["plan"]
    assert page.answer(page.command("interrupt", subshell))["ok"]
    page.until(lambda: asked in page.statuses)
    assert page.answer(later)
    page.until(lambda: page.state["profile"]["unavailable_reason"] == "")


@pytest.mark.fault("G3")
def test_the_end_of_the_session_freezes_the_panel(page: Page) -> None:
    assert page.cell("%%distribute\nprint('last words')") == "ok"
    assert page.cell("%nbdist stop") == "ok"
    page.until(lambda: page.frozen)
    assert WIDGET not in page.frozen
    assert "stopped" in page.frozen["text/html"]
    assert "last words" in page.frozen["text/html"]
    assert "ended" in page.frozen["text/plain"]
    left = page.kernel.run(
        "import threading\nprint(sorted({t.name for t in threading.enumerate()"
        " if t.name.startswith('nbdist')} - {'nbdist-leftovers'}))"
    )
    # but for the launcher that warms up
    assert left.text.strip() in {"[]", "['nbdist-link', 'nbdist-log']"}
    page.send({"kind": "hello"})  # a page that is reloaded now gets the last state
    page.until(lambda: page.messages[-1][0]["kind"] == "reset")
    assert page.messages[-1][0]["state"]["header"]["state"] == "stopped"
    assert page.cell("%nbdist panel --face html") == "ok"
