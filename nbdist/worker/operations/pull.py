"""Models on their way to the notebook: one payload file that all ranks fill; runs on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from nbdist.errors import CheckpointError
from nbdist.protocol import serialization
from nbdist.state import collectives, parallel_writer
from nbdist.state.shards import bytes_of
from nbdist.worker.operations.transaction import CHECKING, Phases, Told
from nbdist.worker.training import prepared_model_view
from nbdist.worker.training.prepared_model_view import Living

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.worker.training.prepared_model_view import Found


def prepared(values: Mapping[str, object]) -> list[str]:
    """Names of those values that an engine has: no rank alone can give them."""
    return [name for name, value in values.items() if prepared_model_view.found(value) is not None]


def plain(value: object) -> object:
    """A module's state dict in the place of the module; anything else as it is."""
    return dict(value.state_dict()) if isinstance(value, nn.Module) else value


def pull(name: str, value: object, folders: Sequence[str], *, tell: Callable[[str], None]) -> Path:
    """Write the state dict of a prepared model, or of a module of one; a collective.

    Each rank writes its own share of each tensor; fp32 masters where the engine has them.

    Args:
        name: of the variable.
        value: it.
        folders: where the file may lie, best first.
        tell: told how far it is.

    Returns:
        The file, the same on all ranks.

    Raises:
        CheckpointError: on all ranks alike.
    """
    path: Path | None = None
    phase = Phases(f"the pull of {name}", tell, CheckpointError)
    offsets: dict[object, int] = {}
    try:
        with phase(CHECKING):
            found = _found(name, value)
            model = Living(found.one)
            wanted = {
                entry.removeprefix(found.prefix): key
                for entry, key in model.entries()
                if entry.startswith(found.prefix)
            }
        with phase("reserving memory"):
            if collectives.rank() == 0:
                path, offsets = serialization.reserve(name, _blanks(model, wanted), folders)
        shared, offsets = collectives.everyones((str(path), offsets))[0]
        with phase("writing"), parallel_writer.Files(durable=False) as files:
            share = {key: one for key, one in model.share.items() if key in offsets}
            mine = [
                parallel_writer.Slot(
                    Path(shared), offset, model.dtypes[str(key)], str(key), 0, model.numel(str(key))
                )
                for key, offset in offsets.items()
            ]
            told = Told(tell, f"pulling {name}", bytes_of(share))
            parallel_writer.write(files, mine, share, told=told)
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    return Path(shared)


def _found(name: str, value: object) -> Found:
    """Find the prepared model.

    Raises:
        CheckpointError: there is none on this rank.
    """
    found = prepared_model_view.found(value)
    if found is None:
        message = f"{name} is a prepared model on some ranks and not on others; prepare it on all."
        raise CheckpointError(message)
    return found


def _blanks(model: Living, wanted: Mapping[str, str]) -> dict[str, serialization.Blank]:
    """Tensors of a state dict before their values are there; tied ones are one."""
    return {
        name: serialization.Blank(
            same=key,
            dtype=str(model.dtypes[key]).removeprefix("torch."),
            itemsize=model.dtypes[key].itemsize,
            shape=model.share[key].shape,
        )
        for name, key in wanted.items()
    }
