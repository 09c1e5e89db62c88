"""Pull of a prepared model: all ranks write its state dict to one file; runs on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from nbdist.errors import CheckpointError
from nbdist.protocol import serialization
from nbdist.state import collectives, parallel_writer
from nbdist.state.shards import total_bytes
from nbdist.worker.operations.transaction import CHECKING_PHASE, ByteProgress, Transaction
from nbdist.worker.training import model_state
from nbdist.worker.training.model_state import ModelTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.worker.training.model_state import ModelReference


def prepared_names(values: Mapping[str, object]) -> list[str]:
    """Return the names of prepared models: a single rank does not have their whole weights."""
    return [name for name, value in values.items() if model_state.find_model(value) is not None]


def to_state_dict(value: object) -> object:
    """Return the state dict of a module; any other value unchanged."""
    return dict(value.state_dict()) if isinstance(value, nn.Module) else value


def pull(
    name: str, value: object, folders: Sequence[str], *, on_phase: Callable[[str], None]
) -> Path:
    """Write the state dict of a prepared model or of one of its modules; a collective.

    Each rank writes its own shard of each tensor, from the fp32 master weights if the engine
    has them.

    Args:
        name: name of the variable.
        value: value of the variable.
        folders: candidate folders for the file, best first.
        on_phase: called with the name of each phase and with progress texts.

    Returns:
        Path of the file, the same on all ranks.

    Raises:
        CheckpointError: the pull failed; raised on all ranks.
    """
    path: Path | None = None
    phase = Transaction(f"Pull of {name}", on_phase, CheckpointError)
    offsets: dict[object, int] = {}
    try:
        with phase(CHECKING_PHASE):
            reference = _found(name, value)
            model = ModelTensors(reference.prepared)
            keys = {
                entry.removeprefix(reference.prefix): key
                for entry, key in model.state_dict_keys()
                if entry.startswith(reference.prefix)
            }
        with phase("reserving memory"):
            if collectives.rank() == 0:
                path, offsets = serialization.reserve_payload(name, _blanks(model, keys), folders)
        shared, offsets = collectives.all_gather_values((str(path), offsets))[0]
        with phase("writing"), parallel_writer.OpenFiles(durable=False) as files:
            share = {key: shard for key, shard in model.owned_shards.items() if key in offsets}
            slots = [
                parallel_writer.TensorFileRegion(
                    Path(shared), offset, model.dtypes[str(key)], str(key), 0, model.numel(str(key))
                )
                for key, offset in offsets.items()
            ]
            progress = ByteProgress(on_phase, f"pulling {name}", total_bytes(share))
            parallel_writer.write_shards(files, slots, share, on_progress=progress)
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    return Path(shared)


def _found(name: str, value: object) -> ModelReference:
    """Find the prepared model that a value belongs to.

    Raises:
        CheckpointError: the value is not part of a prepared model on this rank.
    """
    reference = model_state.find_model(value)
    if reference is None:
        message = (
            f"{name} is a prepared model on some ranks but not on others. Prepare it on all ranks."
        )
        raise CheckpointError(message)
    return reference


def _blanks(
    model: ModelTensors, wanted: Mapping[str, str]
) -> dict[str, serialization.UnfilledTensor]:
    """Describe the tensors of a state dict to reserve; tied tensors share one entry."""
    return {
        name: serialization.UnfilledTensor(
            storage_key=key,
            dtype=str(model.dtypes[key]).removeprefix("torch."),
            itemsize=model.dtypes[key].itemsize,
            shape=model.owned_shards[key].shape,
        )
        for name, key in wanted.items()
    }
