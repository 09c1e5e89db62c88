"""Common GPUs: memory, peak speeds, links, and the source of each figure.

Pure. A link's speed is for one direction; memory is in bytes, speeds are in bytes/s and FLOP/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.measurement_store import DEFAULT_LOOP_EFFICIENCY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.measurement_store import Measurement

GIB = 1 << 30
GB = 1e9
TERA = 1e12

ACHIEVABLE_MEMORY_FRACTION = 0.85
"""Fraction of the peak memory bandwidth that kernels reach."""
ACHIEVABLE_HOST_LINK_FRACTION = 0.85
"""Fraction of PCIe that pinned copies reach: 55 of 63 GB/s on an H200."""
FP32_EFFICIENCY = 0.75
"""Fraction of the fp32 peak; units without tensor cores come closer to their peak."""

FP8_SPEEDUP = 1.45
"""Speedup of linear layers in fp8 over bf16, casts included. With it the torchtitan runs of Llama
8B on H100 (2024) are 1.28 times as fast as without, as published."""

LOOP_DOUBT, FITTED_DOUBT, GUESSED_DOUBT = 0.15, 0.2, 0.4
"""Relative uncertainty of the compute time: measured in a training loop; measured as large matrix
products or fitted to published runs; estimated."""

_TYPE_OF: Mapping[str, str] = {"no": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Memory and speeds of one GPU or one CPU rank."""

    name: str
    memory_bytes: int
    """As CUDA reports it: slightly less than the name says (79.2 GiB of an "80 GB" A100)."""
    free_bytes: int
    """Memory not held by other processes; a plan must fit in it."""
    flops: Mapping[str, float]
    """Data type (fp32, fp16, bf16, fp8) -> dense peak FLOP/s with fp32 accumulation."""
    compute_efficiency: float
    """Fraction of the 16-bit peak that large matrix products reach in a training loop."""
    has_published_efficiency: bool = False
    """True if `compute_efficiency` is fitted to published training runs on this generation."""
    memory_bandwidth: float
    nvlink: float = 0.0
    """Bandwidth in one direction to all other GPUs together; 0 without NVLink."""
    has_nvswitch: bool = False
    """True if NVLink connects all GPUs of a machine, not only pairs."""
    reduces_in_switch: bool = False
    """True for NVSwitch of the third generation or later, which sums all-reduces itself."""
    pcie: float
    """Bandwidth in one direction."""
    host_link: float
    """Bandwidth to host memory for pinned copies."""
    source: str = ""
    """Source of the figures."""
    compute_speed: Measurement | None = None
    """Speeds measured on this machine by a calibration; take precedence over the catalogue."""
    loop_speeds: Mapping[str, Measurement] = field(default_factory=dict)
    """Data type -> speeds that a training loop reached on this machine; take precedence over
    all others."""

    @property
    def has_bf16(self) -> bool:
        """True if the device supports bfloat16."""
        return "bf16" in self.flops

    def peak_flops(self, precision: str) -> float:
        """Return the dense peak FLOP/s for a precision option ("no" is fp32 without TF32)."""
        return self.flops.get(_TYPE_OF.get(precision, precision), self.flops["fp32"])

    def sustained_flops(self, precision: str) -> float:
        """Return the FLOP/s that large matrix products reach in a training loop."""
        kind = _TYPE_OF.get(precision, precision)
        if kind in self.loop_speeds:
            return self.loop_speeds[kind].values["flops"]
        if self.compute_speed is not None and kind in self.compute_speed.values:
            return self.compute_speed.values[kind] * DEFAULT_LOOP_EFFICIENCY
        if kind == "fp32" or kind not in self.flops:
            return self.flops["fp32"] * FP32_EFFICIENCY
        if kind == "fp8":
            return self.sustained_flops("bf16") * FP8_SPEEDUP
        return self.flops[kind] * self.compute_efficiency

    def sustained_memory_bandwidth(self, precision: str) -> float:
        """Return the bytes/s that elementwise kernels read and write in a training loop."""
        kind = _computed_in(precision)
        measured = self.loop_speeds.get(kind, self.compute_speed)
        if measured is not None and "memory" in measured.values:
            return measured.values["memory"]
        return ACHIEVABLE_MEMORY_FRACTION * self.memory_bandwidth

    def scaled(self, factor: float) -> DeviceSpec:
        """Return the same device with its compute speed multiplied by a factor."""
        return replace(
            self,
            flops={kind: factor * peak for kind, peak in self.flops.items()},
            memory_bandwidth=factor * self.memory_bandwidth,
            compute_speed=self.compute_speed and self.compute_speed.scaled(factor),
            loop_speeds={kind: loop.scaled(factor) for kind, loop in self.loop_speeds.items()},
        )

    def measured_date(self, precision: str) -> str:
        """Return the date on which compute was measured here, or "" for catalogue figures."""
        kind = _computed_in(precision)
        if kind in self.loop_speeds:
            return self.loop_speeds[kind].day
        if self.compute_speed is not None and kind in self.compute_speed.values:
            return self.compute_speed.day
        return ""

    def uncertainty(self, precision: str) -> float:
        """Return the relative uncertainty of the compute time."""
        if _computed_in(precision) in self.loop_speeds:
            return LOOP_DOUBT
        fitted = self.measured_date(precision) or self.has_published_efficiency
        return FITTED_DOUBT if fitted else GUESSED_DOUBT


def _computed_in(precision: str) -> str:
    """Return the data type that is measured for a precision."""
    return "bf16" if precision == "fp8" else _TYPE_OF.get(precision, precision)


class _GpuGeneration(NamedTuple):
    """Properties shared by the GPUs of one generation."""

    sustained: float
    pcie: float
    """GB/s."""
    bf16: bool = True
    reduces_in_switch: bool = False
    fitted: bool = False


# `compute_efficiency` of Ampere and Hopper: one fit to eleven published FSDP runs on A100 and H100
# (PyTorch/IBM 2024, Hugging Face/IBM 2024, torchtitan 2025), all within 12 %, with the time of
# elementwise kernels counted separately as in `step_time`; on real data the power limit throttles
# an H100 more than an A100. The others are unfitted estimates, for which plans report a larger
# uncertainty.
_PASCAL = _GpuGeneration(0.5, 15.75, bf16=False)
_VOLTA = _GpuGeneration(0.6, 15.75, bf16=False)
_TURING = _GpuGeneration(0.5, 15.75, bf16=False)
_AMPERE = _GpuGeneration(0.72, 31.5, fitted=True)
_ADA = _GpuGeneration(0.65, 31.5)
_HOPPER = _GpuGeneration(0.52, 63, reduces_in_switch=True, fitted=True)
_BLACKWELL = _GpuGeneration(0.52, 63, reduces_in_switch=True)
_CDNA2 = _GpuGeneration(0.45, 31.5)
_CDNA3 = _CDNA4 = _GpuGeneration(0.45, 63)
_RDNA3 = _GpuGeneration(0.45, 31.5)


def _gpu(  # noqa: PLR0913 - a line of a table
    name: str,
    generation: _GpuGeneration,
    memory: float,
    bandwidth: float,
    tflops: tuple[float, ...],
    nvlink: float = 0,
    *,
    bridged: bool = False,
    source: str = "manufacturer's datasheet",
    host_link: float = 0,
) -> DeviceSpec:
    """Convert one line of the catalogue from datasheet units.

    Args:
        name: family, board unless SXM, memory. A bare family name means its first row.
        generation: what all GPUs of the generation have in common.
        memory: GiB that CUDA typically reports; boards differ by about 0.1 GiB. For a detected GPU
            its own figure is used.
        bandwidth: GB/s.
        tflops: dense, with fp32 accumulation: fp32, 16 bit, and fp8 if supported.
        nvlink: GB/s, one direction.
        bridged: True if NVLink connects only pairs, not all GPUs of a machine.
        source: source of the figures.
        host_link: GB/s if the link is not PCIe; copies reach 375 of NVLink-C2C's 450.
    """
    peaks = dict(zip(("fp32", "fp16", "fp8"), tflops, strict=False))
    peaks |= {"bf16": peaks["fp16"]} if generation.bf16 else {}
    switched = nvlink > 0 and not bridged
    return DeviceSpec(
        name=name,
        memory_bytes=int(memory * GIB),
        free_bytes=int(memory * GIB),
        flops={kind: peak * TERA for kind, peak in peaks.items()},
        compute_efficiency=generation.sustained,
        has_published_efficiency=generation.fitted,
        memory_bandwidth=bandwidth * GB,
        nvlink=nvlink * GB,
        has_nvswitch=switched,
        reduces_in_switch=switched and generation.reduces_in_switch,
        pcie=generation.pcie * GB,
        host_link=(host_link or generation.pcie * ACHIEVABLE_HOST_LINK_FRACTION) * GB,
        source=source,
    )


_TU102 = "NVIDIA Turing whitepaper"
# fmt: off
_ROWS = (
    # name, generation, GiB, GB/s, TFLOP/s, NVLink GB/s
    _gpu("T4-16GB", _TURING, 14.6, 320, (8.1, 65)),
    _gpu("P100-16GB", _PASCAL, 15.9, 732, (9.3, 18.7)),
    _gpu("V100-16GB", _VOLTA, 15.8, 900, (15.7, 125), 150),
    _gpu("V100-32GB", _VOLTA, 31.7, 900, (15.7, 125), 150),
    _gpu("RTX2080Ti-11GB", _TURING, 10.7, 616, (13.4, 53.8), 50, bridged=True, source=_TU102),
    _gpu("TitanRTX-24GB", _TURING, 23.6, 672, (16.3, 130.5), 50, bridged=True, source=_TU102),
    _gpu("RTX3090-24GB", _AMPERE, 23.7, 936, (35.6, 71), 56, bridged=True, source="GA102 paper"),
    _gpu("RTX4090-24GB", _ADA, 23.6, 1008, (82.6, 165.2, 330), source="NVIDIA Ada whitepaper"),
    _gpu("RTX5090-32GB", _BLACKWELL, 31.4, 1792, (104.8, 209.5, 419), source="GB202 whitepaper"),
    _gpu("A10-24GB", _AMPERE, 22.2, 600, (31.2, 125)),
    _gpu("A10G-24GB", _AMPERE, 22.1, 600, (31.5, 70), source="AWS, EC2 G5"),
    _gpu("A30-24GB", _AMPERE, 23.5, 933, (10.3, 165), 100, bridged=True),
    _gpu("A40-48GB", _AMPERE, 44.4, 696, (37.4, 149.7), 56, bridged=True),
    _gpu("A6000-48GB", _AMPERE, 47.4, 768, (38.7, 154.8), 56, bridged=True),
    _gpu("L4-24GB", _ADA, 22.0, 300, (30.3, 121, 242)),
    _gpu("L40S-48GB", _ADA, 44.4, 864, (91.6, 362, 733)),
    _gpu("RTX6000Ada-48GB", _ADA, 47.4, 960, (91.1, 364, 728)),
    _gpu("RTXPRO6000-96GB", _BLACKWELL, 94.9, 1792, (125, 503.8, 1007)),
    _gpu("A100-80GB", _AMPERE, 79.2, 2039, (19.5, 312), 300),
    _gpu("A100-40GB", _AMPERE, 39.4, 1555, (19.5, 312), 300),
    _gpu("A100-PCIe-80GB", _AMPERE, 79.2, 1935, (19.5, 312), 300, bridged=True),
    _gpu("A100-PCIe-40GB", _AMPERE, 39.4, 1555, (19.5, 312), 300, bridged=True),
    _gpu("A800-80GB", _AMPERE, 79.2, 2039, (19.5, 312), 200),
    _gpu("H100-80GB", _HOPPER, 79.1, 3352, (66.9, 989.4, 1978.9), 450),
    _gpu("H100-PCIe-80GB", _HOPPER, 79.1, 2039, (51.2, 756, 1513), 300, bridged=True),
    _gpu("H100-NVL-94GB", _HOPPER, 93.1, 3938, (60, 835, 1671), 300, bridged=True),
    _gpu("H100-96GB", _HOPPER, 94.9, 2400, (66.9, 989.4, 1978.9), 450, source="torchtitan"),
    _gpu("H800-80GB", _HOPPER, 79.1, 3352, (66.9, 989.4, 1978.9), 200),
    _gpu("H200-141GB", _HOPPER, 139.8, 4800, (66.9, 989.4, 1978.9), 450),
    _gpu("GH200-96GB", _HOPPER, 94.5, 4000, (67, 990, 1979), 450, host_link=375),
    _gpu("B200-180GB", _BLACKWELL, 178.4, 8000, (75, 2250, 4500), 900),
    # AMD's published peaks, not measured; fp32 of the matrix cores, a link is Infinity Fabric
    # (XGMI). An MI250 is two GPUs of 64 GB each.
    _gpu("MI210-64GB", _CDNA2, 64.0, 1638, (45.3, 181), 150, bridged=True),
    _gpu("MI250-64GB", _CDNA2, 64.0, 1638, (45.3, 181), 150),
    _gpu("MI250X-64GB", _CDNA2, 64.0, 1638, (47.9, 191.5), 150),
    _gpu("MI300X-192GB", _CDNA3, 191.5, 5300, (163.4, 1307, 2614), 448),
    _gpu("MI325X-256GB", _CDNA3, 255.5, 6000, (163.4, 1307, 2614), 448),
    _gpu("MI355X-288GB", _CDNA4, 287.5, 8000, (157.3, 2517, 5033), 537),
    _gpu("RX7900XTX-24GB", _RDNA3, 24.0, 960, (61.4, 122.8)),
    _gpu("W7900-48GB", _RDNA3, 48.0, 864, (61.3, 122.6)),
)
# fmt: on

GPU_CATALOG: Mapping[str, DeviceSpec] = {device.name: device for device in _ROWS}
"""Name -> device with all of its memory free."""

_FORM_FACTOR = re.compile(r"SXM[0-9]?|PCIE|NVL")
_MEMORY = re.compile(r"([0-9]+)\s*GI?B")
_NOISE = re.compile(
    r"NVIDIA|AMD|INSTINCT|\(MCM\)|OAM|AC MBA|RADEON(?: PRO)?"
    r"|TESLA|GEFORCE|QUADRO|GRAPHICS|GENERATION|BLACKWELL|WORKSTATION|SERVER"
    r"|EDITION|MAX-Q|HBM[0-9]E?|MIG .*|\b(?:GPU|D)\b|[-_ ]"
)


class GpuNameKey(NamedTuple):
    """Key that identifies a GPU in names given by users and drivers."""

    family: str
    board: str | None
    """PCIE or NVL; None for SXM and for cards with a single form factor."""
    memory: int | None
    """GB, if the name contains it."""

    @classmethod
    def parse(cls, name: str) -> GpuNameKey:
        """Parse "NVIDIA A100-SXM4-80GB", "RTX 4090", "4090", "a100-80gb"."""
        text = name.upper()
        memory = _MEMORY.search(text)
        form = _FORM_FACTOR.search(text)
        family = _NOISE.sub("", _FORM_FACTOR.sub("", _MEMORY.sub("", text)))
        board = None if form is None or form[0].startswith("SXM") else form[0]
        return cls(family.removeprefix("RTX"), board, int(memory[1]) if memory else None)


_KEYS: Mapping[str, GpuNameKey] = {name: GpuNameKey.parse(name) for name in GPU_CATALOG}


def gpus_of_family(name: str) -> list[DeviceSpec]:
    """Return all devices of the same family: every A100 for "A100-PCIe-40GB"."""
    family = GpuNameKey.parse(name).family
    return [GPU_CATALOG[known] for known, key in _KEYS.items() if key.family == family]


def find_gpu(name: str, *, memory_bytes: int | None = None) -> DeviceSpec | None:
    """Return the GPU of a user's or driver's name, or None if it is unknown.

    Args:
        name: "H100", "h100-80gb", "NVIDIA A100-SXM4-40GB", "RTX 4090", "4090".
        memory_bytes: total memory reported by the driver, if known.
    """
    parsed = GpuNameKey.parse(name)
    devices = gpus_of_family(name)
    board = [device for device in devices if _KEYS[device.name].board == parsed.board] or devices
    if memory_bytes is not None:
        return min(board, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)
    fitting = (gpu for gpu in board if parsed.memory in {None, _KEYS[gpu.name].memory})
    return next(fitting, None)


def gpu_families() -> dict[str, str]:
    """Map each family to the name of its first device."""
    return {key.family: name for name, key in reversed(list(_KEYS.items()))}
