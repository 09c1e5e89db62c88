"""Common rules about memory and speed that the planner contradicts: a table of docs/planner.md."""

from __future__ import annotations

from typing import Any

import pytest
from published_runs import LLAMA_7B, LLAMA_13B, LLAMA_34B, LLAMA_70B, Setting, gpt2

from nbdist.planner import model_spec

STATES = ("parameters", "master", "gradients", "optimizer")
EIGHT = "8xA100-80GB,nvlink"
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp1")


def setting(model: Any, machine: str, backend: str, **more: Any) -> Setting:
    """One sample of 2048 tokens, activations recomputed, unless given otherwise."""
    given = {"batch_size": 1, "seq_len": 2048, "recompute": "full"} | more
    return Setting(case=0, title="", model=model, devices=machine, backend=backend, **given)


def state_bytes(backend: str, ranks: int) -> float:
    """Bytes per parameter of the training state."""
    parts = setting(
        LLAMA_7B, f"{ranks}xA100-80GB", backend, seq_len=8, optimizer="adamw_fused"
    ).peak.parts
    return sum(parts.get(name, 0) for name in STATES) / model_spec.num_params(LLAMA_7B)


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", 24), ("adamw_fused", 20)])
def test_a_parameter_needs_more_than_16_bytes_under_ddp(optimizer: str, expected: float) -> None:
    one = setting(LLAMA_7B, "8xA100-80GB", "ddp", seq_len=8, optimizer=optimizer)
    found = one.peak.device_bytes / model_spec.num_params(LLAMA_7B)
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("backend", "limit"), [("zero1", 4), ("zero2", 8)])
def test_stages_save_4_and_8_times_on_many_ranks_only(backend: str, limit: float) -> None:
    few, many = (16 / state_bytes(backend, ranks) for ranks in (8, 64))
    assert few < 0.9 * limit
    assert few < many < limit


@pytest.mark.parametrize("machine", [EIGHT, "8xH100-80GB,nvlink", "4xRTX PRO 6000,pcie"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "adamw_8bit"])
def test_seventy_b_fits_neither_eight_of_80_gb_nor_four_of_96(machine: str, optimizer: str) -> None:
    backends = [name for name in BACKENDS if (optimizer, name) != ("adamw_8bit", "fsdp2")]
    found = [setting(LLAMA_70B, machine, name, optimizer=optimizer) for name in backends]
    assert not any(one.fits for one in found)


def test_seventy_b_does_fit_where_there_is_room() -> None:
    many = "4x8xH100-80GB,nvlink,8x400Gb"
    assert setting(LLAMA_70B, many, "fsdp2").fits
    assert not setting(LLAMA_70B, many, "ddp").fits


@pytest.mark.parametrize("model", [LLAMA_7B, LLAMA_13B, LLAMA_34B])
def test_fsdp_and_zero3_are_equally_fast_whatever_the_size(model: Any) -> None:
    zero3, fsdp2 = (
        setting(model, "8x8xA100-80GB,nvlink,8x200Gb", name, seq_len=4096).cost().step_time_s
        for name in ("zero3", "fsdp2")
    )
    assert zero3 / fsdp2 == pytest.approx(1, abs=0.05)


def test_an_offload_to_the_cpu_takes_twice_the_time_or_more() -> None:
    plain, moved = (
        setting(LLAMA_7B, "4xA100-80GB", "zero2", recompute="off", options=options)
        for options in ({}, {"offload": "cpu"})
    )
    assert 2 < moved.cost().step_time_s / plain.cost().step_time_s < 14


def test_zero3_sends_less_than_ddp_with_its_fp32_gradients() -> None:
    sent = {
        name: setting(LLAMA_70B, "64xA100-80GB", name).cost().bytes_on_wire
        for name in ("ddp", "zero1", "zero3", "fsdp2")
    }
    assert sent["ddp"] == max(sent.values()) > sent["zero1"]


@pytest.mark.parametrize("nodes", [16, 64])
def test_gpt_175b_has_the_published_speed_and_scales_linearly(nodes: int) -> None:
    # arXiv 2304.11277: 159 to 186 TFLOP/s, which counts recomputation as work
    devices = f"{nodes}x8xA100-40GB,nvlink,8x200Gb"
    model = gpt2(12288, 96, 96, n_positions=2048, attention="sdpa")
    run = setting(model, devices, "fsdp1", batch_size=2)
    assert 159 * 0.75 < run.cost().mfu * 312 * 4 / 3 < 186 * 1.25
