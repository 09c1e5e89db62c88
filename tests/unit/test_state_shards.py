"""Training state as intervals: the digest, copies, moves between cuts, and layouts of one rank."""

from __future__ import annotations

import math
import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lion_pytorch import Lion
from torch import nn

from nbdist.errors import SwitchError
from nbdist.state import collectives, layouts, reshard, tensor_digest
from nbdist.state.shards import Shard, ShardPiece, copy_to_host, empty_pinned_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
WORLD = 3


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def whole(tensor: torch.Tensor) -> Shard:
    return cut(tensor, [0, tensor.numel()])


def cut(tensor: torch.Tensor, bounds: Sequence[int]) -> Shard:
    """A tensor's elements between bounds, each interval a piece; live."""
    flat = tensor.view(-1)
    pairs = [(a, b) for a, b in pairwise(bounds) if a < b]
    pieces = tuple(ShardPiece(start, stop, flat[start:stop]) for start, stop in pairs)
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)


def summed(*parts: Shard) -> int:
    """Digest of a key whose pieces lie on several ranks."""
    return sum(tensor_digest.local_digests({"key": part})["key"] for part in parts) % 2**64


# -- the digest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 4096, 4097, 70_000])
def test_a_digest_does_not_depend_on_the_cut(dtype: torch.dtype, numel: int) -> None:
    tensor, chance = values(numel, dtype=dtype), random.Random(numel)  # noqa: S311 - cuts, not secrets
    expected = summed(whole(tensor))
    for _ in range(5):
        bounds = sorted({0, numel, *(chance.randrange(numel + 1) for _ in range(9))})
        shards = [cut(tensor, [a, b]) for a, b in pairwise(bounds)]
        assert summed(*shards) == expected
        assert summed(cut(tensor, bounds)) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.int32, 14237960640040172018),
        (torch.float64, 16690024025053283328),
        (torch.bfloat16, 12439036651370789034),
    ],
    ids=str,
)
def test_the_definition_stays_because_checkpoints_hold_digests(
    dtype: torch.dtype, expected: int
) -> None:
    assert summed(whole(torch.arange(10_000).to(dtype))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_digest_sees_elements_at_other_places(dtype: torch.dtype) -> None:
    tensor = values(96, 96, dtype=dtype)
    expected, flat = summed(whole(tensor)), tensor.view(-1)
    assert summed(whole(tensor.t().contiguous())) != expected
    assert summed(whole(flat.roll(1))) != expected
    assert summed(whole(tensor.flip(0).contiguous())) != expected
    for first, second in [(0, 1), (4095, 4096), (5, 4101), (0, 9215)]:
        swapped = flat.clone()
        swapped[[first, second]] = swapped[[second, first]]
        assert summed(whole(swapped)) != expected


def test_a_digest_can_be_that_of_another_type() -> None:
    tensor = values(5_000_000)
    wanted = summed(whole(tensor.to(torch.bfloat16)))
    shards = {"key": cut(tensor, [0, 3, 4_800_001, 5_000_000])}
    assert tensor_digest.local_digests(shards, dtypes={"key": torch.bfloat16})["key"] == wanted
    assert tensor_digest.local_digests(shards, dtypes={"other": torch.bfloat16})["key"] == summed(
        whole(tensor)
    )


# -- moves, on ranks that are threads


class Ranks:
    """Ranks in one process: the collectives of `wires`, among threads."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._said: list[Any] = [None] * WORLD
        self._together = threading.Barrier(WORLD)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returns, or the error that it raises."""
        results: list[Any] = [None] * WORLD

        def one(number: int) -> None:
            self._own.rank = number
            try:
                results[number] = work(number)
            except SwitchError as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return results

    def group_size(self, group: object = None) -> int:
        assert group is None
        return WORLD

    def rank(self, group: object = None) -> int:
        assert group is None
        return int(self._own.rank)

    def comm_device(self) -> torch.device:
        return torch.device("cpu")

    def all_gather_values(self, mine: Any) -> list[Any]:
        self._said[self.rank()] = mine
        self._together.wait(timeout=20)
        found = list(self._said)
        self._together.wait(timeout=20)
        return found

    def all_reduce_sum(self, numbers: Sequence[int]) -> list[int]:
        everyone = np.array(self.all_gather_values(list(numbers)), dtype=np.int64)
        return [int(one) for one in everyone.reshape(WORLD, -1).sum(0)]

    def all_to_all_bytes(
        self,
        outgoing: torch.Tensor,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> torch.Tensor:
        everyone = self.all_gather_values(outgoing.split(list(sizes)))
        mine = [parts[self.rank()] for parts in everyone]
        assert [one.numel() for one in mine] == list(expected)
        return torch.cat(mine)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    for name in (
        "group_size",
        "rank",
        "comm_device",
        "all_gather_values",
        "all_reduce_sum",
        "all_to_all_bytes",
    ):
        monkeypatch.setattr(collectives, name, getattr(made, name))
    return made


SHAPES: dict[str, tuple[int, ...]] = {
    "model.a": (211, 45),
    "model.b": (45,),
    "model.c": (),
    "model.nothing": (0, 4),
    "optim.state.a.exp_avg": (211, 45),
}


def bounds(numel: int, chance: random.Random) -> list[int]:
    """Cuts of a tensor at random places."""
    return sorted({0, numel, *(chance.randrange(numel + 1) for _ in range(5))})


def owned(tensors: dict[str, torch.Tensor], seed: int) -> list[dict[str, Shard]]:
    """Each element on one of the ranks."""
    chance = random.Random(seed)  # noqa: S311
    found: list[dict[str, Shard]] = [{} for _ in range(WORLD)]
    for key, tensor in tensors.items():
        parts: list[list[ShardPiece]] = [[] for _ in range(WORLD)]
        for piece in cut(tensor, bounds(tensor.numel(), chance)).pieces:
            parts[chance.randrange(WORLD)].append(piece)
        for rank in range(WORLD):
            if parts[rank] or chance.random() < 0.5:  # a rank may not know what it has nothing of
                found[rank][key] = Shard(
                    shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=tuple(parts[rank])
                )
    return found


def wanted(
    tensors: dict[str, torch.Tensor], seed: int, dtype: torch.dtype
) -> tuple[list[dict[str, Shard]], list[dict[str, torch.Tensor]]]:
    """Some elements on each rank, whatever the others have; and the tensors that they lie in."""
    chance = random.Random(seed)  # noqa: S311
    shards: list[dict[str, Shard]] = []
    rooms: list[dict[str, torch.Tensor]] = []
    for _ in range(WORLD):
        room = {key: torch.full_like(one, -1).to(dtype) for key, one in tensors.items()}
        rooms.append(room)
        shards.append({})
        for key, one in room.items():
            every = cut(one, bounds(one.numel(), chance))
            kept = tuple(piece for piece in every.pieces if chance.random() < 0.7)
            shards[-1][key] = Shard(shape=every.shape, dtype=dtype, pieces=kept)
    return shards, rooms


@pytest.mark.parametrize("batch_bytes", [16, 1000, reshard.BATCH_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_cut_moves_into_any_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(reshard, "BATCH_BYTES", batch_bytes)
    small: dict[str, tuple[int, ...]] = {"model.b": (45,), "model.c": ()}
    shapes = SHAPES if batch_bytes > 16 else small
    tensors = {key: values(*shape, seed=len(key)) for key, shape in shapes.items()}
    for seed in range(3):
        source = owned(tensors, seed)
        target, rooms = wanted(tensors, seed + 100, dtype)
        sent = ranks.run(lambda rank: reshard.reshard(source[rank], target[rank]))  # noqa: B023
        assert all(isinstance(one, int) for one in sent), sent
        for shards, room in zip(target, rooms, strict=True):
            for key, shard in shards.items():
                given = torch.full_like(tensors[key], -1).to(dtype).view(-1)
                for piece in shard.pieces:
                    original = tensors[key].view(-1)[piece.start : piece.stop]
                    given[piece.start : piece.stop] = original.to(dtype)
                assert torch.equal(room[key].view(-1), given)


def test_what_is_there_already_is_not_sent(ranks: Ranks) -> None:
    tensors = {"model.a": values(90), "model.b": values(30)}
    source = [
        {key: cut(one, [rank * one.numel() // 3, (rank + 1) * one.numel() // 3])}
        for rank in range(WORLD)
        for key, one in [("model.a", tensors["model.a"])]
    ]
    rooms = [torch.zeros(90) for _ in range(WORLD)]
    target = [{"model.a": cut(rooms[rank], [30 * rank, 30 * rank + 30])} for rank in range(WORLD)]
    assert ranks.run(lambda rank: reshard.reshard(source[rank], target[rank])) == [0, 0, 0]
    shifted = [{"model.a": cut(rooms[rank], [30 * rank, 30 * rank + 31])} for rank in (0, 1)]
    shifted.append({"model.a": cut(rooms[2], [60, 90])})
    assert ranks.run(lambda rank: reshard.reshard(source[rank], shifted[rank])) == [0, 4, 4]
    assert torch.equal(rooms[0][:31], tensors["model.a"][:31])


@pytest.mark.parametrize(
    ("pieces", "shape", "words"),
    [
        ([[0, 4], [4, 8], [8, 9]], (10,), "Element 9 of model.a"),
        ([[0, 4], [3, 8], [8, 10]], (10,), "Element 4 of model.a"),
        ([[0, 4], [4, 8], [8, 10]], (5, 2), r"shapes \[5, 2\] and \[10\]"),
        ([[0, 0], [0, 0], [0, 0]], (10,), "no owner"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    ranks: Ranks, pieces: list[list[int]], shape: tuple[int, ...], words: str
) -> None:
    tensor, rooms = values(10), [torch.full(shape, -1.0) for _ in range(WORLD)]
    results = ranks.run(
        lambda rank: reshard.reshard(
            {"model.a": cut(tensor, pieces[rank])}, {"model.a": whole(rooms[rank])}
        )
    )
    for result in results:
        with pytest.raises(SwitchError, match=words):
            raise result
    assert all(torch.equal(room, torch.full(shape, -1.0)) for room in rooms)


def test_missing_optimizer_state_becomes_zero(ranks: Ranks) -> None:
    rooms = [torch.ones(10) for _ in range(WORLD)]
    ranks.run(lambda rank: reshard.reshard({}, {"optim.state.a.exp_avg": cut(rooms[rank], [2, 5])}))
    assert [room.tolist() for room in rooms] == [[1, 1, 0, 0, 0, 1, 1, 1, 1, 1]] * WORLD


# -- layouts, of a model without an engine


class Small(nn.Module):
    """Tied weights, a frozen one, one of no dimension, an odd memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)  # noqa: FBT003 - torch's signature
        self.scale = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.conv(torch.ones(1, 3, 4, 4)).sum()
        hidden = self.frozen(self.first(x) + self.second(x))
        return (hidden * self.scale).square().sum() * image.square()


def trained(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, Any]:
    """A model after two steps, and its optimizer."""
    torch.manual_seed(0)
    model = Small()
    optimizer = kind([one for one in model.parameters() if one.requires_grad], **options)
    for _ in range(2):
        model(torch.ones(2, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def named(layout: layouts.Layout, *, owned: bool) -> dict[str, Shard]:
    """Everything of a layout under the keys of checkpoints."""
    found = {f"model.{name}": one for name, one in layout.weights(owned=owned).items()}
    for name, states in layout.optimizer_state(owned=owned).items():
        found |= {f"optim.state.{name}.{state}": one for state, one in states.items()}
    return found


OPTIMIZERS: list[tuple[Any, dict[str, Any], set[str], set[str]]] = [
    (torch.optim.SGD, {"lr": 1e-4}, set(), set()),
    (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}, {"momentum_buffer"}, set()),
    (torch.optim.AdamW, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
    (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    (torch.optim.ASGD, {}, {"ax"}, {"step", "eta", "mu"}),
    (torch.optim.Rprop, {}, {"prev", "step_size"}, {"step"}),
    (torch.optim.RMSprop, {"centered": True}, {"square_avg", "grad_avg"}, {"step"}),
    (torch.optim.Adagrad, {}, {"sum"}, {"step"}),
]


@pytest.mark.parametrize(("kind", "options", "tensors", "scalars"), OPTIMIZERS)
def test_any_element_wise_optimizer_is_carried(
    kind: Any, options: dict[str, Any], tensors: set[str], scalars: set[str]
) -> None:
    model, optimizer = trained(kind, **options)
    layout = layouts.layout_for(model, [optimizer])
    assert set(layout.weights(owned=True)) == {name for name, _ in model.named_parameters()}
    trainable = {name for name, one in model.named_parameters() if one.requires_grad}
    states, counts = layout.optimizer_state(owned=True), layout.scalar_state()
    assert {name: set(one) for name, one in states.items()} == dict.fromkeys(
        trainable if tensors else (), tensors
    )
    assert {name: set(one) for name, one in counts.items()} == dict.fromkeys(
        trainable if scalars else (), scalars
    )
    kept = copy_to_host(named(layout, owned=True))
    loss = model(torch.ones(2, 5))
    torch.manual_seed(1)
    other = Small()
    again = kind([one for one in other.parameters() if one.requires_grad], **options)
    target = layouts.layout_for(other, [again])
    target.allocate_optimizer_state(
        {name: dict.fromkeys(one, torch.float32) for name, one in states.items()}
    )
    reshard.reshard(kept, named(target, owned=False))
    target.finalize_state(counts)
    now = named(layouts.layout_for(other, [again]), owned=True)
    assert tensor_digest.local_digests(now) == tensor_digest.local_digests(kept)
    assert layouts.layout_for(other, [again]).scalar_state() == counts
    assert torch.equal(other(torch.ones(2, 5)), loss)
    for one, its in ((model, optimizer), (other, again)):
        one(torch.ones(2, 5)).backward()
        its.step()
    assert torch.equal(other(torch.ones(2, 5)), model(torch.ones(2, 5)))


def test_a_model_before_its_first_step_has_no_state() -> None:
    model = Small()
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    layout = layouts.layout_for(model, [optimizer])
    assert layout.optimizer_state(owned=True) == {}
    assert layout.scalar_state() == {}
    assert not optimizer.state


class Counting(Lion):
    """A user's variant of an element-wise optimizer, which counts in whole numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("mean", torch.zeros_like(one)).lerp_(one.grad, 0.1)
                state["nothing"] = None


def test_counts_keep_the_form_that_their_optimizer_gives_them() -> None:
    model, optimizer = trained(Counting)
    counts = layouts.layout_for(model, [optimizer]).scalar_state()
    assert counts["scale"] == {"step": 2.0}
    torch.manual_seed(1)
    other = Small()
    again = Counting(one for one in other.parameters() if one.requires_grad)
    layouts.layout_for(other, [again]).finalize_state(counts)
    assert again.state[other.scale]["step"] == 2
    assert type(again.state[other.scale]["step"]) is int
    adam = torch.optim.AdamW([other.scale])
    layouts.layout_for(other, [adam]).finalize_state({"scale": {"step": 5.0}})
    assert adam.state[other.scale]["step"].dtype == torch.float32
    assert adam.state[other.scale]["step"] == 5


def test_state_that_is_not_element_wise_is_refused() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    optimizer.state[model.first.weight]["row"] = torch.ones(3)
    with pytest.raises(SwitchError, match=r"'row' of first.weight is \[3\]"):
        layouts.layout_for(model, [optimizer]).optimizer_state(owned=True)
    optimizer.state[model.first.weight]["row"] = ["of", "words"]
    with pytest.raises(SwitchError, match="is list"):
        layouts.layout_for(model, [optimizer]).optimizer_state(owned=True)


def test_a_library_that_keeps_things_elsewhere_is_noticed() -> None:
    class DeepSpeedZeroOptimizer:
        """As deepspeed's, of another release."""

        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    class Engine(nn.Module):
        """As deepspeed's."""

        def __init__(self) -> None:
            super().__init__()
            self.module, self.optimizer = nn.Linear(2, 2), DeepSpeedZeroOptimizer()

        def set_gradient_accumulation_boundary(self) -> None:
            raise NotImplementedError

    words = r"training state of deepspeed [\d.]+: .* has no update_lp_params"
    with pytest.raises(SwitchError, match=words):
        layouts.check_layout(Engine())
    other = Engine()
    other.optimizer = torch.optim.SGD(other.parameters())  # type: ignore[assignment]
    with pytest.raises(SwitchError, match="replaced the optimizer with its SGD"):
        layouts.layout_for(other)


def test_freeing_leaves_no_tensor_in_a_model_or_its_optimizer() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    parameters = list(model.parameters())
    layouts.free_model(model, [optimizer])
    layouts.free_model(model, [optimizer])
    assert sum(math.prod(one.shape) for one in parameters) == 0
    assert list(model.parameters()) == []
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_page_locked_memory_is_given_back_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(True), raising=False)
    empty_pinned_cache()
    assert emptied == [True] * on_gpu
