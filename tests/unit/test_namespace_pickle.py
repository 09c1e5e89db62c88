"""What is packed on one rank is unpacked on another, or refused with the reason."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nbdist.worker.operations import namespace_pickle
from nbdist.worker.operations.namespace_pickle import ExternalObject, PickleStage, PickleStageError

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def cell(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    made = {"__name__": "__main__"} if names is None else names
    exec(textwrap.dedent(code), made)  # noqa: S102 - as IPython does
    return made


def sent(
    names: dict[str, Any], folder: Path, ranks: int = 1
) -> list[namespace_pickle.NamespaceReader]:
    """Pack variables on ranks that hold the same, and open the parcels."""
    stages = [PickleStage(value, 0, name) for name, value in names.items() if name[0] != "_"]
    packed = [namespace_pickle.pickle_stages(stages, [], names) for _ in range(ranks)]
    for rank, one in enumerate(packed):
        digests = [digest for digest, _ in one.hash_blocks()]
        namespace_pickle.write_namespace(one, digests, folder, rank)
    return [namespace_pickle.NamespaceReader(folder, rank, CPU) for rank in range(ranks)]


def test_equal_blocks_of_several_ranks_are_written_once(tmp_path: Path) -> None:
    names = {"weights": torch.arange(1000.0), "array": np.arange(500), "empty": torch.empty(0)}
    for arrived in sent(names, tmp_path, ranks=2):
        found: dict[str, Any] = {}
        arrived.set_namespace(found)
        assert arrived.bind_variables() == list(names)
        assert torch.equal(found["weights"], names["weights"])
        found["array"][0] = 7
        assert found["array"].tolist()[1:] == list(range(1, 500))
    sizes = [path.stat().st_size for path in tmp_path.glob("block-*")]
    assert sorted(sizes) == [0, 4000, 4000]


def test_known_objects_are_names_and_come_in_order() -> None:
    model = torch.nn.Linear(1, 1)
    known = [ExternalObject(model, ("model",), 1)]
    with pytest.raises(PickleStageError, match="prepared later") as caught:
        namespace_pickle.pickle_stages([PickleStage([model], 0)], known, {})
    assert caught.value.is_too_early
    packed = namespace_pickle.pickle_stages(
        [PickleStage(None, 0), PickleStage([model], 1)], known, {}
    )
    assert not packed.blocks
    namespace_pickle.verify_unpickles(packed, known, {})


def test_what_cannot_be_unpacked_is_found_on_trial() -> None:
    names = cell(
        """
        class Odd(Exception):
            def __init__(self, one, two): super().__init__(one)
        odd = Odd(1, 2)
        """
    )
    stages = [PickleStage(names["Odd"], 0, "Odd"), PickleStage(names["odd"], 0, "odd")]
    packed = namespace_pickle.pickle_stages(stages, [], names)
    with pytest.raises(PickleStageError, match="TypeError") as caught:
        namespace_pickle.verify_unpickles(packed, [], {})
    assert caught.value.stage_index == 1
    names = cell(
        """
        class Late:
            def __setstate__(self, state): self.__dict__.update(state, scale=SCALE)
        late = Late(); late.x = 1
        SCALE = 3
        """
    )
    stages = [PickleStage(names["Late"], 0, "Late"), PickleStage(names["late"], 0, "late")]
    packed = namespace_pickle.pickle_stages(stages, [], names)
    with pytest.raises(PickleStageError, match="name 'SCALE' is not defined"):
        namespace_pickle.verify_unpickles(packed, [], {})
    namespace_pickle.verify_unpickles(packed, [], {"SCALE": 3})
    assert type(names["late"]) is names["Late"]
