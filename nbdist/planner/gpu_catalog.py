"""Common GPUs: memory, peak speeds, links, and where each figure is from.

Pure. A link's speed is of one direction; memory is in bytes, speeds are in bytes/s and FLOP/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.measurements import Pace

GIB = 1 << 30
GB = 1e9
TERA = 1e12

MEMORY_SHARE = 0.85
"""Of a memory's peak bandwidth that kernels reach."""
HOST_LINK_SHARE = 0.85
"""Of PCIe, for page-locked copies: 55 of 63 GB/s on an H200."""
FP32_SUSTAINED = 0.75
"""Plain units, without tensor cores, run nearer to their peak."""

FP8_GAIN = 1.45
"""Of linear layers in fp8 against bf16, casts included: with it the torchtitan runs of Llama 8B on
H100 (2024) come out 1.28 times as fast as without, as published."""

LOOP_DOUBT, FITTED_DOUBT, GUESSED_DOUBT = 0.15, 0.2, 0.4
"""Shares by which the time of computing may differ: measured in a training loop, as large products
or fitted to published runs, and estimated."""

_TYPE_OF: Mapping[str, str] = MappingProxyType({"no": "fp32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or one CPU rank: its memory and its speeds."""

    name: str
    memory_bytes: int
    """As CUDA reports it: a little less than the name says (79.2 GiB of an "80 GB" A100)."""
    free_bytes: int
    """Of it, what no other process holds; a plan has to fit in this."""
    flops: Mapping[str, float]
    """Type (fp32, fp16, bf16, fp8) -> dense peak FLOP/s with fp32 accumulation."""
    sustained: float
    """Of the 16-bit peak, what large matrix products reach in a training loop."""
    fitted: bool = False
    """`sustained` is from published training runs on this generation."""
    memory_bandwidth: float
    nvlink: float = 0.0
    """One direction, to all other GPUs together; 0 where there is none."""
    switched: bool = False
    """Its NVLink joins all GPUs of a machine and not pairs."""
    reduces_in_switch: bool = False
    """NVSwitch of the third generation or later sums all-reduces itself."""
    pcie: float
    """One direction."""
    host_link: float
    """To the host's memory, page-locked."""
    source: str = ""
    """Where the figures are from."""
    pace: Pace | None = None
    """What was measured on this machine; it counts before the catalogue."""

    @property
    def bf16(self) -> bool:
        """It computes in bfloat16."""
        return "bf16" in self.flops

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s for an option's precision ("no" is fp32 without TF32)."""
        return self.flops.get(_TYPE_OF.get(precision, precision), self.flops["fp32"])

    def reached(self, precision: str) -> float:
        """FLOP/s that large matrix products reach in a training loop."""
        kind = _TYPE_OF.get(precision, precision)
        if self.pace is not None and (measured := self.pace.flops(kind)) is not None:
            return measured
        if kind == "fp32" or kind not in self.flops:
            return self.flops["fp32"] * FP32_SUSTAINED
        if kind == "fp8":
            return self.reached("bf16") * FP8_GAIN
        return self.flops[kind] * self.sustained

    def memory_reached(self, precision: str) -> float:
        """Bytes/s that elementwise kernels read and write in a training loop."""
        kind = _computed_in(precision)
        measured = None if self.pace is None else self.pace.memory_in(kind)
        return MEMORY_SHARE * self.memory_bandwidth if measured is None else measured

    def faster(self, factor: float) -> Device:
        """The same device, so many times as fast in computing."""
        return replace(
            self,
            flops=MappingProxyType({kind: factor * peak for kind, peak in self.flops.items()}),
            memory_bandwidth=factor * self.memory_bandwidth,
            pace=self.pace and self.pace.faster(factor),
        )

    def measured_on(self, precision: str) -> str:
        """Day on which computing was measured on this machine; "" for the catalogue's figures."""
        return "" if self.pace is None else self.pace.source(_computed_in(precision))

    def doubt(self, precision: str) -> float:
        """Share by which the time of computing may differ."""
        if self.pace is None or not self.measured_on(precision):
            return FITTED_DOUBT if self.fitted else GUESSED_DOUBT
        return LOOP_DOUBT if _computed_in(precision) in self.pace.loops else FITTED_DOUBT


def _computed_in(precision: str) -> str:
    """The type that was measured for a precision."""
    return "bf16" if precision == "fp8" else _TYPE_OF.get(precision, precision)


class _Generation(NamedTuple):
    """What the GPUs of one generation have in common."""

    sustained: float
    pcie: float
    """GB/s."""
    bf16: bool = True
    reduces_in_switch: bool = False
    fitted: bool = False


# `sustained` of Ampere and Hopper: one fit to eleven published FSDP runs on A100 and H100
# (PyTorch/IBM 2024, Hugging Face/IBM 2024, torchtitan 2025), all within 12 %, with the time of
# elementwise kernels counted apart as `cost` does; on real numbers the power limit holds an H100
# back more than an A100. The others are estimates, fitted to nothing: a plan says so by a larger
# uncertainty.
_PASCAL = _Generation(0.5, 15.75, bf16=False)
_VOLTA = _Generation(0.6, 15.75, bf16=False)
_TURING = _Generation(0.5, 15.75, bf16=False)
_AMPERE = _Generation(0.72, 31.5, fitted=True)
_ADA = _Generation(0.65, 31.5)
_HOPPER = _Generation(0.52, 63, reduces_in_switch=True, fitted=True)
_BLACKWELL = _Generation(0.52, 63, reduces_in_switch=True)
_CDNA = _Generation(0.45, 31.5)


class _Row(NamedTuple):
    """One line of the catalogue, in the units of datasheets."""

    name: str
    """Family, board where it is not SXM, memory. Of one family the first is meant by its name."""
    generation: _Generation
    memory: float
    """GiB that CUDA reports, typically: boards differ by some 0.1 GiB, and of a GPU that was found
    its own figure counts."""
    bandwidth: float
    """GB/s."""
    tflops: tuple[float, ...]
    """Dense, with fp32 accumulation: fp32, 16 bit, and fp8 where it has it."""
    nvlink: float = 0
    """GB/s, one direction."""
    bridged: bool = False
    """NVLink joins pairs and not all GPUs of a machine."""
    source: str = "its maker's datasheet"
    host_link: float = 0
    """GB/s, where it is not PCIe: of NVLink-C2C's 450 copies reach 375."""

    def device(self) -> Device:
        """The same in bytes and FLOP/s."""
        kinds = dict(zip(("fp32", "fp16", "fp8"), self.tflops, strict=False))
        made = self.generation
        kinds |= {"bf16": kinds["fp16"]} if made.bf16 else {}
        switched = self.nvlink > 0 and not self.bridged
        return Device(
            name=self.name,
            memory_bytes=int(self.memory * GIB),
            free_bytes=int(self.memory * GIB),
            flops=MappingProxyType({kind: peak * TERA for kind, peak in kinds.items()}),
            sustained=made.sustained,
            fitted=made.fitted,
            memory_bandwidth=self.bandwidth * GB,
            nvlink=self.nvlink * GB,
            switched=switched,
            reduces_in_switch=switched and made.reduces_in_switch,
            pcie=made.pcie * GB,
            host_link=(self.host_link or made.pcie * HOST_LINK_SHARE) * GB,
            source=self.source,
        )


_TU102 = "NVIDIA Turing whitepaper"
# fmt: off
_ROWS = (
    # name, generation, GiB, GB/s, TFLOP/s, NVLink GB/s
    _Row("T4-16GB", _TURING, 14.6, 320, (8.1, 65)),
    _Row("P100-16GB", _PASCAL, 15.9, 732, (9.3, 18.7)),
    _Row("V100-16GB", _VOLTA, 15.8, 900, (15.7, 125), 150),
    _Row("V100-32GB", _VOLTA, 31.7, 900, (15.7, 125), 150),
    _Row("RTX2080Ti-11GB", _TURING, 10.7, 616, (13.4, 53.8), 50, bridged=True, source=_TU102),
    _Row("TitanRTX-24GB", _TURING, 23.6, 672, (16.3, 130.5), 50, bridged=True, source=_TU102),
    _Row("RTX3090-24GB", _AMPERE, 23.7, 936, (35.6, 71), 56, bridged=True, source="GA102 paper"),
    _Row("RTX4090-24GB", _ADA, 23.6, 1008, (82.6, 165.2, 330), source="NVIDIA Ada whitepaper"),
    _Row("RTX5090-32GB", _BLACKWELL, 31.4, 1792, (104.8, 209.5, 419), source="GB202 whitepaper"),
    _Row("A10-24GB", _AMPERE, 22.2, 600, (31.2, 125)),
    _Row("A10G-24GB", _AMPERE, 22.1, 600, (31.5, 70), source="AWS, EC2 G5"),
    _Row("A30-24GB", _AMPERE, 23.5, 933, (10.3, 165), 100, bridged=True),
    _Row("A40-48GB", _AMPERE, 44.4, 696, (37.4, 149.7), 56, bridged=True),
    _Row("A6000-48GB", _AMPERE, 47.4, 768, (38.7, 154.8), 56, bridged=True),
    _Row("L4-24GB", _ADA, 22.0, 300, (30.3, 121, 242)),
    _Row("L40S-48GB", _ADA, 44.4, 864, (91.6, 362, 733)),
    _Row("RTX6000Ada-48GB", _ADA, 47.4, 960, (91.1, 364, 728)),
    _Row("RTXPRO6000-96GB", _BLACKWELL, 94.9, 1792, (125, 503.8, 1007)),
    _Row("A100-80GB", _AMPERE, 79.2, 2039, (19.5, 312), 300),
    _Row("A100-40GB", _AMPERE, 39.4, 1555, (19.5, 312), 300),
    _Row("A100-PCIe-80GB", _AMPERE, 79.2, 1935, (19.5, 312), 300, bridged=True),
    _Row("A100-PCIe-40GB", _AMPERE, 39.4, 1555, (19.5, 312), 300, bridged=True),
    _Row("A800-80GB", _AMPERE, 79.2, 2039, (19.5, 312), 200),
    _Row("H100-80GB", _HOPPER, 79.1, 3352, (66.9, 989.4, 1978.9), 450),
    _Row("H100-PCIe-80GB", _HOPPER, 79.1, 2039, (51.2, 756, 1513), 300, bridged=True),
    _Row("H100-NVL-94GB", _HOPPER, 93.1, 3938, (60, 835, 1671), 300, bridged=True),
    _Row("H100-96GB", _HOPPER, 94.9, 2400, (66.9, 989.4, 1978.9), 450, source="torchtitan"),
    _Row("H800-80GB", _HOPPER, 79.1, 3352, (66.9, 989.4, 1978.9), 200),
    _Row("H200-141GB", _HOPPER, 139.8, 4800, (66.9, 989.4, 1978.9), 450),
    _Row("GH200-96GB", _HOPPER, 94.5, 4000, (67, 990, 1979), 450, host_link=375),
    _Row("B200-180GB", _BLACKWELL, 178.4, 8000, (75, 2250, 4500), 900),
    _Row("MI250-64GB", _CDNA, 64.0, 1638, (45.3, 181), 150),
    _Row("MI300X-192GB", _CDNA, 191.5, 5300, (163.4, 1307, 2614), 448),
)
# fmt: on

CATALOGUE: Mapping[str, Device] = MappingProxyType({row.name: row.device() for row in _ROWS})
"""Name -> device, all of its memory free."""

_FORM = re.compile(r"SXM[0-9]?|PCIE|NVL")
_MEMORY = re.compile(r"([0-9]+)\s*GI?B")
_NOISE = re.compile(
    r"NVIDIA|AMD|INSTINCT|TESLA|GEFORCE|QUADRO|GRAPHICS|GENERATION|BLACKWELL|WORKSTATION|SERVER"
    r"|EDITION|MAX-Q|HBM[0-9]E?|MIG .*|\b(?:GPU|D)\b|[-_ ]"
)


class Key(NamedTuple):
    """What tells GPUs apart in the names that people and drivers give them."""

    family: str
    board: str | None
    """PCIE or NVL; None for SXM, and for cards that exist in one form."""
    memory: int | None
    """GB, where the name has it."""

    @classmethod
    def of(cls, name: str) -> Key:
        """Read "NVIDIA A100-SXM4-80GB", "RTX 4090", "4090", "a100-80gb"."""
        text = name.upper()
        memory = _MEMORY.search(text)
        form = _FORM.search(text)
        family = _NOISE.sub("", _FORM.sub("", _MEMORY.sub("", text)))
        board = None if form is None or form[0].startswith("SXM") else form[0]
        return cls(family.removeprefix("RTX"), board, int(memory[1]) if memory else None)


_KEYS: Mapping[str, Key] = MappingProxyType({name: Key.of(name) for name in CATALOGUE})


def family(name: str) -> list[Device]:
    """All devices of the family that a name is of: every A100 for "A100-PCIe-40GB"."""
    wanted = Key.of(name).family
    return [CATALOGUE[known] for known, key in _KEYS.items() if key.family == wanted]


def lookup(name: str, *, memory_bytes: int | None = None) -> Device | None:
    """Find a GPU by its name, as people or as the driver write it; None if it is unknown.

    Args:
        name: "H100", "h100-80gb", "NVIDIA A100-SXM4-40GB", "RTX 4090", "4090".
        memory_bytes: what the driver says it has, where it said so.
    """
    wanted = Key.of(name)
    same = family(name)
    board = [device for device in same if _KEYS[device.name].board == wanted.board] or same
    if memory_bytes is not None:
        return min(board, key=lambda one: abs(one.memory_bytes - memory_bytes), default=None)
    fitting = (one for one in board if wanted.memory in {None, _KEYS[one.name].memory})
    return next(fitting, None)


def families() -> dict[str, str]:
    """Family -> the name of its first device."""
    return {key.family: name for name, key in reversed(list(_KEYS.items()))}
