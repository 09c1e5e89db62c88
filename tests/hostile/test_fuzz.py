"""Thousands of inputs that nobody would type: each is taken, or refused in a sentence.

50 inputs each with every test run, 10,000 with `make nightly`.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from IPython.core.error import UsageError

from nbdist import rank_sets, strategies
from nbdist.checkpoint import CheckpointFile, name_validation
from nbdist.checkpoint.manifest import Manifest
from nbdist.errors import NbdistError, OptionError, PlanError
from nbdist.hardware import discovery
from nbdist.magics import arguments, magics, results
from nbdist.panel import commands, static_page
from nbdist.panel.snapshot import ProfileViewCache
from nbdist.planner import target_devices
from nbdist.planner.measurement_store import MeasurementStore, device_overhead
from nbdist.planner.models import analytic, traced
from nbdist.profiler.measurements import (
    CollectiveStats,
    DataLoaderStats,
    LineProfile,
    PeakMemory,
    RankProfile,
)
from nbdist.profiler.profile import Profile
from nbdist.profiler.profile_data import ProfiledConfig
from nbdist.protocol import messages
from nbdist.session import config as session_config
from nbdist.session import device_placement
from nbdist.session.cell import Cell
from nbdist.session.metrics import Metrics
from tests.hostile.fuzzing import NESTED, hold, mutated, often, plain, texts, trees
from tests.unit import small_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

MAX_SENTENCE = 2000
MANIFEST = json.loads(
    small_checkpoints.manifest(
        (CheckpointFile(name="model-00000-0.safetensors", size_bytes=10, crc32=1),)
    ).to_json()
)


def short(error: Exception, typed: str = "") -> None:
    """Refusals are for people, and may repeat what was typed; argparse always does."""
    assert len(str(error)) > 0
    assert len(str(error)) < MAX_SENTENCE + len(typed) or isinstance(error, UsageError)


# ------------------------------------------------------------------------- what a user types

rank_texts = st.one_of(texts, st.text(alphabet="0123456789,- ", max_size=30))


@often
@pytest.mark.fault("D7")
def test_sets_of_ranks(examples: int) -> None:
    def check(text: str) -> None:
        try:
            found = rank_sets.resolve_ranks(text, 8)
        except OptionError as error:
            short(error)
        else:
            assert found == tuple(sorted(set(found)))
            assert found
            assert set(found) <= set(range(8))

    hold(check, rank_texts, examples)


@often
@pytest.mark.fault("D7")
def test_ranks_that_are_not_text(examples: int) -> None:
    def check(given: Any) -> None:
        with contextlib.suppress(OptionError):
            assert set(rank_sets.resolve_ranks(given, 8)) <= set(range(8))

    hold(check, st.one_of(st.lists(plain, max_size=5), st.integers(), st.booleans()), examples)


def lines(flags: list[str]) -> st.SearchStrategy[str]:
    """Lines of a magic: real options, real values, and nonsense among them."""
    values = st.sampled_from(
        [
            *("zero3", "ddp", "fsdp2", "2", "0,1", "bf16", "cpu", "nvme:/nowhere", "a,b", "'x y'"),
            *(
                "{}",
                '{"a": 1}',
                '\'{"zero_optimization": {"stage": 3}}\'',
                "none",
                "0.5",
                "--",
                "-",
            ),
        ]
    )
    word = st.one_of(st.sampled_from([*flags, "-n", "-b"]), values, texts)
    return st.lists(word, max_size=6).map(" ".join)


def quietly(call: Any, typed: str = "") -> Any:
    """Call; a refusal is as good as a result."""
    try:
        return call()
    except (NbdistError, UsageError) as error:
        short(error, typed)
        return None


@often
@pytest.mark.fault("S6")
def test_the_line_of_a_distribute_cell(examples: int) -> None:
    def check(line: str) -> None:
        def read() -> None:
            given = magics.parse_distribute_line(line)
            arguments.check_contradictory_options(given)
            options = arguments.session_options(given)
            quietly(lambda: rank_sets.resolve_ranks(given.ranks, 4), line)
            quietly(lambda: arguments.parse_names(given.push or ""), line)
            session_config.SessionConfig.from_options(
                {"nproc": 2, **options}, session_config.SessionCluster({})
            )

        quietly(read, line)

    hold(check, lines(arguments.option_flags(magics.NbDist.distribute.parser)), examples)


COMMANDS = ("switch", "export", "save", "load", "checkpoints", "panel", "profile", "doctor")


@often
@pytest.mark.parametrize("command", COMMANDS)
def test_the_line_of_a_command(command: str, examples: int) -> None:
    parser = arguments.PARSERS[command]

    def check(line: str) -> None:
        quietly(lambda: parser.parse_args(arguments.split_line(line, command)))

    hold(check, lines(arguments.option_flags(parser)), examples)


def plan_of(line: str) -> None:
    options = arguments.PARSERS["plan"].parse_args(arguments.split_line(line, "plan"))
    results.run_plan_command(options, {}, None)


@often
@pytest.mark.fault("F6")
def test_the_line_of_plan(examples: int) -> None:
    def check(line: str) -> None:
        quietly(lambda: plan_of(line))

    # sizes and nonsense alone: a plan of a good model takes a while
    hold(check, lines(["--devices", "--batch-size", "--seq-len", "--check"]), examples)


@often
@pytest.mark.fault("A4")
def test_lists_of_gpus_and_numbers_of_ranks(examples: int) -> None:
    def check(given: Any) -> None:
        quietly(lambda: device_placement.parse_count(given))
        quietly(lambda: device_placement.choose_placement(2, given, discovery.discover_machine()))
        quietly(
            lambda: device_placement.choose_placement(given, "none", discovery.discover_machine())
        )

    hold(check, st.one_of(rank_texts, plain, st.lists(plain, max_size=4)), examples)


# ---------------------------------------------------------------------------- what files hold


@often
@pytest.mark.fault("E10")
@pytest.mark.fault("S15")
def test_names_of_checkpoints_stay_in_their_folder(examples: int, tmp_path: Path) -> None:
    def check(name: Any) -> None:
        try:
            path = name_validation.checkpoint_path(tmp_path, name)
        except NbdistError as error:
            short(error)
        else:
            assert path.parent == tmp_path
            assert path.resolve().parent == tmp_path.resolve()

    hold(check, st.one_of(texts, plain, st.text("./a\0", max_size=8)), examples)


@often
@pytest.mark.fault("E9")
@pytest.mark.fault("S7")
def test_manifests(examples: int) -> None:
    def check(tree: Any) -> None:
        text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        found = quietly(lambda: Manifest.from_json(text))
        for part in found.files if found else ():
            assert name_validation.is_checkpoint_name(part.name.split(".")[0])
            assert "/" not in part.name

    anything = st.one_of(mutated(MANIFEST), trees, st.binary(max_size=200))
    hold(check, anything, examples)


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "auto_map": {"AutoModelForCausalLM": "evil.Model"},
}


@often
@pytest.mark.fault("F6")
@pytest.mark.fault("F8")
def test_configs_of_models(examples: int) -> None:
    def check(config: Any) -> None:
        def read() -> None:
            traced.check_model_type(config)
            analytic.spec_from_config(config)

        with contextlib.suppress(PlanError):
            read()

    hold(check, mutated(CONFIG), examples)


@often
@pytest.mark.fault("F6")
def test_devices_in_words(examples: int) -> None:
    parts = st.sampled_from(["8x", "H100", "-80GB", ",nvlink", "24GB", " cpu", "2*", "1e9x", "nan"])
    words = st.one_of(texts, st.lists(parts, max_size=5).map("".join))

    def check(text: str) -> None:
        quietly(lambda: target_devices.parse_devices(text))

    hold(check, words, examples)


ZERO = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 2,
}
FSDP = {
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_ram_efficient_loading": False,
    }
}


@often
@pytest.mark.fault("A12")
@pytest.mark.parametrize(
    ("backend", "name", "good"),
    [("zero3", "deepspeed_config", ZERO), ("fsdp2", "fsdp_config", FSDP)],
)
def test_config_files_of_engines(
    backend: str, name: str, good: dict[str, Any], examples: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"

    def check(tree: Any) -> None:
        file.write_text(json.dumps(tree))

        def read() -> None:
            content = strategies.load_config(file)
            session_config.SessionConfig.from_options(
                {"nproc": 2, "backend": backend, name: content}, session_config.SessionCluster({})
            )

        quietly(read)

    hold(check, st.one_of(mutated(good), trees), examples)


@often
def test_what_was_measured_of_a_machine(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "measurements.json"
    known = MeasurementStore("host", file)
    known.record("collective", "A", {"4096": 1e-3, str(1 << 26): 0.1})
    known.record("compute", "A", {"fp32": 1e10, "memory": 1e9})
    known.record("loop", "A", {"flops": 1e10, "memory": 1e9})
    known.record("disk", "ext4 on /dev/vda", {"read": 1e9, "write": 1e9})
    known.record("memory", "A, ddp, none", {"factor": 1.2, "context_bytes": 10**9})
    known.save()
    good = json.loads(file.read_text())

    def check(tree: Any) -> None:
        file.write_text(json.dumps(tree))
        found = MeasurementStore("host", file)
        links, (_, disk) = found.get("collective", "A"), found.latest("disk") or ("", None)
        assert links is None or (links.collective_time_s(1 << 20) or 1.0) > 0
        for kind in ("compute", "loop"):
            speed = found.get(kind, "A")  # type: ignore[arg-type]
            assert speed is None or min(speed.values.values()) > 0
        assert disk is None or min(disk.values.values()) > 0
        memory = device_overhead(found, "A", "ddp", "none", kind="cuda", world_size=2)
        assert memory.factor > 0
        assert memory.context_bytes >= 0

    hold(check, st.one_of(mutated(good), trees), examples)


@pytest.mark.parametrize("text", [NESTED, '{"a":' * 100_000, "[1e999, NaN, -Infinity]", "\ufeff{}"])
def test_json_that_is_too_deep_or_odd_is_refused_everywhere(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    quietly(lambda: strategies.load_config(file))
    quietly(lambda: strategies.load_config("{" + text))
    quietly(lambda: Manifest.from_json(text.encode()))
    quietly(lambda: plan_of(f"{tmp_path}"))
    MeasurementStore("host", file)
    with pytest.raises(ValueError, match="is not a launcher message"):
        messages.decode_line(text.encode())


# --------------------------------------------------------------------------- what others send


@often
@pytest.mark.fault("S6")
def test_lines_of_the_link(examples: int) -> None:
    good = json.loads(messages.encode_line(messages.AllRanksExited(3, {"0": -9}, error="x")))

    def check(line: Any) -> None:
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        with contextlib.suppress(ValueError):
            assert isinstance(messages.decode_line(data), messages.LauncherMessage)

    hold(check, st.one_of(mutated(good), trees, st.binary(max_size=200)), examples)


CONTENTS: dict[str, Any] = {
    "execute_reply": {"status": "error", "ename": "E", "evalue": "", "traceback": ["E"]},
    "status": {"execution_state": "idle"},
    "stream": {"name": "stdout", "text": "x"},
    "display_data": {"data": {"text/plain": "x"}, "metadata": {}, "transient": {"display_id": "1"}},
    "update_display_data": {"data": {"text/plain": "x"}, "metadata": {}, "transient": {}},
    "execute_result": {
        "data": {"text/plain": "x"},
        "metadata": {messages.CELL_METADATA_KEY: {"$": "tuple", "items": [1]}},
        "execution_count": 1,
    },
    "error": {"ename": "E", "evalue": "", "traceback": ["E"]},
    "clear_output": {"wait": True},
    messages.SENT_VALUE: {"name": "x", "path": "/dev/shm/x"},  # noqa: S108 - nothing is there
    messages.OOM_ADVICE: {"lines": ["x"], "held_bytes": 3},
}


@often
@pytest.mark.fault("D13")
@pytest.mark.parametrize("kind", CONTENTS)
def test_contents_of_messages_of_a_rank(kind: str, examples: int) -> None:
    channel = "shell" if kind == "execute_reply" else "iopub"
    assert (channel, kind) in Cell.HANDLERS

    def check(content: Any) -> None:
        cell = Cell((0, 1), Mock(), on_send=lambda *_: None, on_done=lambda _: None, on_comm=print)
        header = {"msg_type": kind, "date": datetime.now(tz=UTC)}
        message = {"header": header, "content": content, "metadata": {}, "buffers": []}
        cell.on_message((0,), channel, message)  # type: ignore[arg-type]
        cell.render_pending(0.0)

    hold(check, mutated(CONTENTS[kind]), examples)


@often
def test_rows_of_report(examples: int) -> None:
    good = [{"step": 1, "time": 2.0, "loss": 3.0}, {"step": 2, "time": 2.0, "loss": "nan"}]

    def check(rows: Any) -> None:
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            # the reader thread logs these and goes on
            Metrics(2).add_rows(0, rows)

    hold(check, st.one_of(mutated(good), trees), examples)


COMMAND = {
    "kind": "command",
    "id": "7",
    "name": "switch",
    "arguments": {"backend": "zero3", "nproc": 2, "accumulate": 4, "offload_params": True},
}


@often
@pytest.mark.fault("G2")
def test_messages_of_a_page(examples: int) -> None:
    def check(message: Any) -> None:
        try:
            found = commands.parse_message(message)
        except commands.InvalidPanelMessage as error:
            short(error)
            return
        assert isinstance(found, commands.PanelCommand) or found["kind"] in {"hello", "log"}
        if isinstance(found, commands.PanelCommand):
            assert found.name in commands.ARGUMENTS
            assert found.arguments.keys() <= commands.ARGUMENTS[found.name].keys()

    asks = {"kind": "log", "rank": 0, "search": "x"}
    profile = {"kind": "command", "id": "7", "name": "profile", "arguments": {}}
    anything = st.one_of(mutated(COMMAND), mutated(asks), mutated(profile), trees)
    hold(check, anything, examples)


FIGURES = RankProfile(
    rank=1,
    kind="cpu",
    device="cpu",
    ends=[10.0, 10.2, 10.4],
    parts={"data": 0.1, "forward": 0.05, "communication": 0.05},
    traffic=[CollectiveStats(name="all_reduce", count=2, bytes=5, seconds=0.05, exposed_s=0.05)],
    loaders=[
        DataLoaderStats(
            num_workers=0, pin_memory=False, batch_size=8, sharded=True, batches=1.0, fetch_s=0.1
        )
    ],
    memory=PeakMemory(
        parts={"parameters": 5}, lines=[LineProfile(cell="In[1]", line=1, source="x", bytes=5)]
    ),
    notes=["x"],
).to_json()


@often
@pytest.mark.fault("G1")
def test_figures_of_a_rank_in_the_panel(examples: int) -> None:
    setting = ProfiledConfig(
        options=strategies.Options(), cluster=target_devices.parse_devices("2xcpu")
    )
    good = RankProfile.from_json({**FIGURES, "rank": 0})

    def check(figures: Any) -> None:
        try:
            made = Profile.of([good, RankProfile.from_json(figures)], setting)
        except Exception:  # noqa: BLE001 - the kernel tells it below the cell
            return
        session = SimpleNamespace(
            profiles=[made], options=setting.options, why_no_profile=lambda: ""
        )
        view = ProfileViewCache().current_view(session)  # type: ignore[arg-type]
        json.dumps(view, allow_nan=False, ensure_ascii=False).encode()  # as jupyter_client does
        blocks = static_page.profile_blocks(view)
        assert "<img" not in static_page.blocks_html(blocks)
        assert all(isinstance(line, str) for line in static_page.blocks_text(blocks))

    hold(check, mutated(FIGURES), examples)
