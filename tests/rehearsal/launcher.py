"""nbdist's launcher; its ranks write what they see of their GPUs, and end.

Before each start everything that the launcher imports in advance is in.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nbdist.launcher import __main__ as launcher

if TYPE_CHECKING:
    from nbdist.launcher.kernel_link import KernelLink
    from nbdist.protocol import messages

RTX_40 = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


def next_launch(link: KernelLink) -> messages.LaunchRanksRequest:
    """Import everything, then wait for a request."""
    while launcher.WARM_UP_IMPORTS:
        importlib.import_module(launcher.WARM_UP_IMPORTS.pop(0))
    return link.launch_queue.get()


def in_rank() -> None:
    """Look around where a rank would begin to use CUDA."""
    from nbdist.worker import process_group
    from nbdist.worker.memory import memory_probe

    usual = process_group.create_default_group
    seen: dict[str, Any] = {}
    # the first call of a rank that opens NVML and asks about its GPU
    memory_probe.before_context = lambda _device: seen.update(look())

    def join(store: Any, *, on_gpu: bool) -> NoReturn:  # noqa: ARG001 - as the function replaced
        usual(store, on_gpu=False)
        seen["available_memory"] = available_memory()
        folder = Path(os.environ["NBDIST_TEST_SEEN"])
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
        process_group.distributed.barrier()  # the end of one rank ends the others
        sys.exit(3)

    process_group.create_default_group = join  # type: ignore[assignment]


def look() -> dict[str, Any]:
    """What a rank sees before anything of CUDA."""
    import torch
    from transformers.utils import import_utils

    return {
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "nccl": {name: os.environ[name] for name in RTX_40 if name in os.environ},
        "cuda": torch.version.cuda,
        "broken fork": torch.cuda._is_in_bad_fork(),
        "threads": torch.get_num_threads(),
        # asked at the import of transformers.modeling_utils, and dependent on torch's answer
        "cached answers": import_utils.is_flash_attn_2_available.cache_info().currsize,
        "nvml opened": ctypes.CDLL("libnvidia-ml.so.1").fake_nvml_opened(),
    }


def available_memory() -> int | str:
    """What DeepSpeed's ZeRO-1 and ZeRO-2 ask for each parameter group."""
    from deepspeed.accelerator import get_accelerator

    from nbdist.strategies import Hardware
    from nbdist.worker.engines import deepspeed

    deepspeed.init_deepspeed(Hardware(kind="cuda", world_size=int(os.environ["WORLD_SIZE"])))
    accelerator = get_accelerator()
    accelerator.total_memory = lambda _index: 40 << 30  # asked where NVML cannot be
    try:
        return int(accelerator.available_memory(0))
    except Exception as error:  # noqa: BLE001 - shown in the test
        return repr(error)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    launcher.WARM_UP_IMPORTS.append("asks_for_cuda")
    launcher.next_launch = next_launch
    os.register_at_fork(after_in_child=in_rank)
    launcher.main()
