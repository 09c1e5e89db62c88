"""FSDP1 and FSDP2: peaks that were measured, and what must hold of any setup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.planner import memory, model_spec
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import analytic
from nbdist.planner.optimizers import OPTIMIZERS
from nbdist.strategies import Options
from tests.unit import model_configs

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import MemoryUsage

SMALL = model_configs.llama(256, 704, 2, 8, 4, 8000, head_dim=32)
POSITIONS = model_configs.gpt2(64, 4, 2, 2000, n_positions=256)

# Most bytes of the third step on rank 0 of a fake group, one sample of 64 tokens; torch 2.13,
# accelerate 1.15: on real tensors with Footprint, for several nodes on fake tensors with
# FSDPMemTracker, which does not see the copies of gradients that torch makes on a CPU.
MEASURED: list[tuple[dict[str, Any], dict[str, Any], int, int]] = [
    (SMALL | {"num_hidden_layers": 4}, {"backend": "fsdp2"}, 8, 32_392_168),
    (SMALL | {"tie_word_embeddings": True}, {"backend": "fsdp2"}, 8, 26_384_700),
    (SMALL, {"backend": "fsdp2", "accumulate": 2}, 8, 51_018_080),
    (
        # Gradients of uneven rows are padded, in fp32 if they are accumulated.
        SMALL
        | {"hidden_size": 448, "intermediate_size": 1472, "num_attention_heads": 7}
        | {"num_key_value_heads": 7, "head_dim": 64, "vocab_size": 7635}
        | {"tie_word_embeddings": True},
        {"backend": "fsdp2", "accumulate": 2},
        3,
        116_015_500,
    ),
    (SMALL, {"backend": "fsdp1"}, 8, 37_769_888),
    (SMALL, {"backend": "fsdp1", "accumulate": 3}, 8, 46_127_648),
    (POSITIONS, {"backend": "fsdp1", "precision": "no"}, 16, 5_429_600),
    (
        SMALL | {"num_hidden_layers": 4},
        {"backend": "fsdp2", "nodes": 2, "kind": "cuda"},
        8,
        41_502_500,
    ),
    (SMALL, {"backend": "fsdp2", "nodes": 4, "accumulate": 2, "kind": "cuda"}, 8, 71_995_100),
    (POSITIONS, {"backend": "fsdp2", "nodes": 3, "precision": "no"}, 9, 6_569_432),
]


@pytest.mark.parametrize(("config", "options", "ranks", "measured"), MEASURED)
def test_peaks_that_were_measured(
    config: dict[str, Any], options: dict[str, Any], ranks: int, measured: int
) -> None:
    optimizer = "adamw_fused" if options.get("precision") else "adamw"
    found = _peak(config, ranks=ranks, optimizer=optimizer, **options)
    assert found.device_bytes == pytest.approx(measured, rel=0.0015)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("config", [SMALL, SMALL | {"tie_word_embeddings": True}, POSITIONS])
def test_more_ranks_hold_less_and_more_tokens_more(config: dict[str, Any], backend: str) -> None:
    by_ranks = [_peak(config, ranks=n, backend=backend).device_bytes for n in (2, 4, 8, 16, 64)]
    assert by_ranks == sorted(by_ranks, reverse=True)
    by_batch = [_peak(config, batch_size=n, backend=backend).device_bytes for n in (1, 2, 3, 8, 64)]
    assert by_batch == sorted(by_batch)
    by_length = [
        _peak(config, seq_len=n, backend=backend).device_bytes for n in (1, 16, 64, 128, 256)
    ]
    assert by_length == sorted(by_length)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_recomputation_lowers_the_peak_of_many_layers(backend: str, precision: str) -> None:
    deep = SMALL | {"num_hidden_layers": 24, "vocab_size": 500}
    kept = _peak(deep, batch_size=8, backend=backend, precision=precision)
    again = _peak(
        deep, batch_size=8, backend=backend, precision=precision, activation_checkpointing=True
    )
    assert again.device_bytes < kept.device_bytes / 2


@pytest.mark.parametrize(("backend", "element"), [("fsdp2", 4), ("fsdp1", 2)])
def test_accumulating_keeps_whole_gradients_on_every_rank(backend: str, element: int) -> None:
    # accelerate 1.15 does not reduce before the last micro-batch: the reduce type, fp32, under
    # FSDP2; autograd's own, bf16, under FSDP1.
    model = analytic.spec_from_config(SMALL)
    for ranks in (8, 64):
        moments = _moments(SMALL, ranks=ranks, backend=backend, accumulate=4)
        losses = [one for one in moments if one.name == "loss"]
        assert losses[-1].parts["gradients"] == element * model_spec.num_params(model)


def test_a_whole_model_is_there_when_nothing_is_resharded() -> None:
    kept = _losses(SMALL, reshard=False)
    model = analytic.spec_from_config(SMALL)
    assert kept.parts["gathered"] == 2 * model_spec.num_params(model)
    tail = model.groups[-1].num_params
    assert _losses(SMALL, reshard=True).parts["gathered"] == 2 * tail


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_offload_moves_shards_and_optimizer_to_the_host(backend: str) -> None:
    here = _moments(SMALL, backend=backend)
    away = _moments(SMALL, backend=backend, offload="cpu")
    for one, other in zip(here, away, strict=True):
        assert one.device_bytes == other.device_bytes + sum(other.host_parts.values())
        assert other.host_parts["parameters"] == one.parts["parameters"]
        assert other.parts.get("optimizer", 0) == 0


def test_sixteen_bytes_a_parameter_after_the_backward_and_twenty_in_the_step() -> None:
    model = analytic.spec_from_parameter_count("7b")
    step = _moments_of(model, ranks=8)[-1]
    assert step.name == "optimizer step"
    held = step.device_bytes - step.parts["logits"]
    assert held == pytest.approx(20 * model_spec.num_params(model) / 8, rel=1e-3)
    fused = _moments_of(model, ranks=8, optimizer="adamw_fused")[-1]
    assert step.device_bytes - fused.device_bytes == pytest.approx(
        4 * model_spec.num_params(model) / 8, rel=1e-3
    )


def test_adapters_have_neither_gradients_nor_optimizer_for_the_rest() -> None:
    model = analytic.spec_from_parameter_count("7b")
    adapted = model.with_lora(16)
    whole, small = _moments_of(model, ranks=8)[-1], _moments_of(adapted, ranks=8)[-1]
    assert small.parts["optimizer"] == pytest.approx(
        8 * model_spec.num_trainable_params(adapted) / 8, rel=1e-3
    )
    assert small.parts["gradients"] < whole.parts["gradients"] / 100


def test_rows_are_padded_to_equal_shards() -> None:
    # 8000 rows on 7 ranks are 1143 a rank, 8001 in all; of 256 rows 37 a rank, 259 in all.
    (tail,) = [one for one in _moments(SMALL, ranks=7) if one.name == "loss"]
    assert tail.parts["gathered"] == 2 * (8001 * 256 + 259)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reshard": False}])
def test_replicas_hold_what_their_node_alone_would(options: dict[str, Any]) -> None:
    alone = _moments(SMALL, ranks=4, **options)
    assert _moments(SMALL, ranks=12, nodes=3, **options) == alone


def test_nodes_reduce_on_the_gpu_what_goes_to_the_host() -> None:
    alone, replicated = (
        [
            one
            for one in _moments(SMALL, ranks=4 * nodes, nodes=nodes, offload="cpu", kind="cuda")
            if "backward" in one.name
        ]
        for nodes in (1, 2)
    )
    gone = [one.host_parts["gradients"] for one in alone]
    assert max(gone) > 0
    assert [one.host_parts["gradients"] for one in replicated] == gone
    more = [b.parts["buffers"] - a.parts["buffers"] for a, b in zip(alone, replicated, strict=True)]
    assert more == gone


def _moments(config: dict[str, Any], **given: Any) -> list[MemoryUsage]:
    return _moments_of(analytic.spec_from_config(config), **given)


def _moments_of(model: Any, **given: Any) -> list[MemoryUsage]:
    setup = _setup(given)
    work = Workload(
        batch_size=given.get("batch_size", 1),
        seq_len=given.get("seq_len", 64),
        compute=compute_mode(setup.options),
        activation_checkpointing=setup.options.activation_checkpointing,
        kind="cpu",
    )
    return list(memory.step_memory_usage(model, work, setup))


def _setup(given: dict[str, Any]) -> TrainingSetup:
    names = {"backend", "precision", "accumulate", "offload", "activation_checkpointing"}
    options = {key: value for key, value in given.items() if key in names}
    if not given.get("reshard", True):
        options["fsdp_config"] = {"reshard_after_forward": False}
    nodes = given.get("nodes", 1)
    options["replicate_across"] = "nodes" if nodes > 1 else "none"
    return TrainingSetup(
        options=Options(**({"backend": "fsdp2", "precision": "bf16"} | options)),
        world_size=given.get("ranks", 8),
        optimizer=OPTIMIZERS[given.get("optimizer", "adamw")],
        kind=given.get("kind", "cpu"),
        num_nodes=nodes,
    )


def _peak(config: dict[str, Any], **given: Any) -> MemoryUsage:
    return max(_moments(config, **given), key=lambda one: one.device_bytes)


def _losses(config: dict[str, Any], **given: Any) -> MemoryUsage:
    (found,) = [one for one in _moments(config, **given) if one.name == "loss"]
    return found
