"""Pull of variables of one rank, and of a prepared model of all ranks; runs on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from nbdist.errors import CheckpointError, PayloadError
from nbdist.protocol import messages, serialization
from nbdist.protocol.operations import RankPullReport
from nbdist.state import collectives, shard_io
from nbdist.state.shards import total_bytes
from nbdist.worker.operations.collective_phases import (
    CHECKING_PHASE,
    ByteProgress,
    CollectivePhases,
)
from nbdist.worker.training.prepared_models import find_model
from nbdist.worker.training.training_state import ModelTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.operations import PullModelRequest
    from nbdist.worker.operations import RankContext


def write_variables(
    request: messages.PullRequest, variables: Mapping[str, object]
) -> messages.PayloadFileReply:
    """Write variables of this rank to a payload file; modules as their state dict.

    If some are prepared models, return their names instead: a single rank does not have their
    whole weights.

    Raises:
        PayloadError: no such variable, or it cannot be moved.
    """
    if missing := [name for name in request["names"] if name not in variables]:
        raise PayloadError(
            f"No variable {', '.join(missing)} on this rank. Define it in a %%distribute cell."
        )
    values = {name: variables[name] for name in request["names"]}
    prepared = [name for name, value in values.items() if find_model(value) is not None]
    if prepared:
        return messages.PayloadFileReply(status="ok", prepared=prepared)
    plain = {
        name: dict(value.state_dict()) if isinstance(value, nn.Module) else value
        for name, value in values.items()
    }
    path = serialization.write_payload_to_free_folder(plain, request["folders"])
    return messages.PayloadFileReply(status="ok", path=str(path))


def pull_model(request: PullModelRequest, context: RankContext) -> RankPullReport:
    """Write the state dict of a prepared model or of one of its modules; a collective.

    Each rank writes its own shard of each tensor, from the fp32 master weights if the engine
    has them.

    Raises:
        CheckpointError: the pull failed; raised on all ranks.
    """
    name = request.name
    phase = CollectivePhases(f"Pull of {name}", context.on_phase, CheckpointError)
    with phase(CHECKING_PHASE):
        reference = find_model(context.variables.get(name))
        if reference is None:
            raise CheckpointError(
                f"{name} is a prepared model on some ranks but not on others. Prepare it on all"
                " ranks."
            )
        model = ModelTensors(reference.prepared)
        # Tied tensors have the same key and share one entry of the file.
        unfilled = {
            entry.removeprefix(reference.prefix): serialization.UnfilledTensor(
                storage_key=key,
                dtype=str(model.dtypes[key]).removeprefix("torch."),
                itemsize=model.dtypes[key].itemsize,
                shape=model.owned_shards[key].shape,
            )
            for entry, key in model.state_dict_keys()
            if entry.startswith(reference.prefix)
        }
    path: Path | None = None
    offsets: dict[object, int] = {}
    try:
        with phase("reserving memory"):
            if collectives.rank() == 0:
                path, offsets = serialization.reserve_payload(name, unfilled, request.folders)
        shared, offsets = collectives.all_gather_values((str(path), offsets))[0]
        with phase("writing"), shard_io.OpenFiles(durable=False) as files:
            share = {key: shard for key, shard in model.owned_shards.items() if key in offsets}
            regions = [
                shard_io.TensorFileRegion(
                    Path(shared), offset, model.dtypes[str(key)], str(key), 0, model.numel(str(key))
                )
                for key, offset in offsets.items()
            ]
            progress = ByteProgress(context.on_phase, f"pulling {name}", total_bytes(share))
            shard_io.write_regions(files, regions, share, on_progress=progress)
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    return RankPullReport(path=shared)
