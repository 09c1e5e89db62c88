"""Where six engines keep the state, on two real CPU ranks: all of it moves between all of them.

One session and one living process a rank; the cells run nbdist's own code.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests import engines

if TYPE_CHECKING:
    from nbdist import Session

PRELUDE = textwrap.dedent(
    """
    import functools, gc, itertools, math
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper,
    )
    from tests.models import gpt2
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from nbdist.errors import SwitchError
    from nbdist.worker.engines import accelerator_patch as accelerators
    from nbdist.state import collectives, tensor_digest, layouts, reshard as moving, shards
    from nbdist.strategies import Options

    tokens = torch.randint(0, 211, (256, 24), generator=torch.Generator().manual_seed(5))
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % 211

    class Parts(nn.Module):
        '''Adapters on a frozen base, a buffer that counts, a weight that no loss reaches.'''

        def __init__(self, base):
            super().__init__()
            self.base = base
            self.register_buffer("seen", torch.zeros(()))
            self.down = nn.Parameter(torch.randn(45, 7) / 7)
            self.up = nn.Parameter(torch.randn(7, 45) / 7)
            self.unused = nn.Parameter(torch.randn(13))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input_ids, labels):
            hidden = self.base.transformer(input_ids).last_hidden_state
            hidden = hidden + (hidden @ self.down @ self.up) * self.scale
            self.seen += 1
            hidden = hidden * (1 + 0.25 * self.seen).to(hidden.dtype)
            return self.base.loss_function(self.base.lm_head(hidden), labels, 211)

    class Whole(nn.Module):
        '''Returns the loss alone.'''

        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, input_ids, labels):
            return self.base(input_ids=input_ids, labels=labels).loss

    def build(kind):
        if kind == "checkpointed":
            return checkpointed(Whole(gpt2()))
        if kind == "adapters":
            model = Parts(gpt2())
            model.base.requires_grad_(False)
            model.base.transformer.h[1].mlp.requires_grad_(True)
            return model
        return Whole(gpt2())

    def checkpointed(model):
        '''Recompute each block's activations, with torch's own wrapper around it.'''
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda one: isinstance(one, GPT2Block)
        )
        return model

    def optimizer_for(model):
        trained = [one for one in model.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3)

    class Training:
        '''A model under an engine, in this process.'''

        def __init__(self, backend, kind="adamw", seed=0, **options):
            hardware = accelerators.current_config().hardware
            accelerators.set_options(Options(backend=backend, **options).validate(hardware))
            # the weight without a gradient: DDP wants to know
            handlers = [DistributedDataParallelKwargs(find_unused_parameters=kind == "adapters")]
            self.accelerator = Accelerator(kwargs_handlers=handlers)
            torch.manual_seed(seed)
            model = build(kind)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer_for(model))
            self.accumulate = options.get("accumulate", 1)

        def train(self, first, last):
            losses = []
            self.model.train()
            for step in range(first * self.accumulate, last * self.accumulate):
                batch = tokens[4 * (2 * step + rank):][:4]
                with self.accelerator.accumulate(self.model):
                    loss = self.model(input_ids=batch, labels=batch)
                    self.accelerator.backward(loss)
                    self.optimizer.step(); self.optimizer.zero_grad()
                losses.append(self.accelerator.reduce(loss.detach().float(), "mean").item())
            return losses

        @property
        def layout(self):
            return layouts.layout_for(self.model, [self.optimizer])

        def state(self, owned):
            return named(self.layout, owned)

        def buffers(self):
            inner = self.accelerator.unwrap_model(self.model)
            return [one for _, one in inner.named_buffers()]

    def named(layout, owned):
        found = {f"model.{name}": one for name, one in layout.weights(owned=owned).items()}
        for name, states in layout.optimizer_state(owned=owned).items():
            found |= {f"optim.state.{name}.{state}": one for state, one in states.items()}
        return found

    class Kept:
        '''What a switch takes with it.'''

        def __init__(self, training):
            self.shards = shards.copy_to_host(training.state(owned=True))
            self.counts = training.layout.scalar_state()
            self.buffers = [one.clone() for one in training.buffers()]
            self.digests = tensor_digest.global_digests(self.shards)
            self.names = {}
            # under FSDP1 a rank has no keys for optimizer state without elements on it
            types = [(key, one.dtype) for key, one in self.shards.items()]
            for key, dtype in itertools.chain(*collectives.all_gather_values(types)):
                if key.startswith("optim.state."):
                    name, _, state = key.removeprefix("optim.state.").rpartition(".")
                    self.names.setdefault(name, {})[state] = dtype

        def into(self, training):
            layout = training.layout
            layout.allocate_optimizer_state(self.names)
            sent = moving.reshard(self.shards, named(layout, owned=False))
            layout.finalize_state(self.counts)
            for one, old in zip(training.buffers(), self.buffers, strict=True):
                one.copy_(old)
            return sent

    def differing(one, two):
        return sorted(key for key in one.keys() | two.keys() if one.get(key, 0) != two.get(key, 0))

    def apart(training, kept):
        '''Keys whose values are not the kept ones, in the types that the engine keeps.'''
        state = training.state(owned=True)
        types = {key: one.dtype for key, one in state.items()}
        mine = tensor_digest.global_digests(state)
        return differing(mine, tensor_digest.global_digests(kept.shards, dtypes=types))

    def farthest(one, two):
        return max(abs(a - b) for a, b in zip(one, two, strict=True))

    def covered(state):
        '''Whether all ranks' pieces together have each element once.'''
        mine = [(key, piece.start, piece.stop, math.prod(one.shape))
                for key, one in state.items() for piece in one.pieces]
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        at, sizes = {}, {}
        for key, start, stop, size in sorted(one for theirs in everyone for one in theirs):
            assert start == at.get(key, 0) and stop > start, (key, start, stop, at.get(key))
            at[key], sizes[key] = stop, size
        return at == sizes and at.keys() >= {k for k, one in state.items() if math.prod(one.shape)}
    """
)


@pytest.fixture(scope="module")
def prepared(session: Session) -> Session:
    """Two CPU ranks with models and a way to change the engine."""
    session.run(PRELUDE)
    return session


@pytest.fixture
def ranks(prepared: Session) -> Session:
    """The same, with nothing in use that another test has prepared."""
    prepared.run("training = other = plain = kept = None")
    return prepared


@pytest.mark.nightly
def test_deepspeeds_other_optimizer_for_bfloat16(ranks: Session) -> None:
    cell = """
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    training = Training("zero1", precision="bf16", deepspeed_config=config)
    training.train(0, 3)
    layouts.check_layout(training.model)
    kept, complete = Kept(training), covered(training.state(owned=True))
    expected = training.train(3, 6)
    other = Training("zero1", seed=9, precision="bf16", deepspeed_config=config)
    kept.into(other)
    wrong, far = apart(other, kept), farthest(expected, other.train(3, 6))
    plain = Training("fsdp1", seed=9, precision="bf16")
    kept.into(plain)
    (type(training.model.optimizer).__name__, complete, wrong, far, apart(plain, kept))
    """
    found = ranks.run(textwrap.dedent(cell)).values[0]
    assert found == ("BF16_Optimizer", True, [], 0.0, [])


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    # deepspeed 0.19.8 then forgets the order when it links parameters to their masters
    ("zero2", {"stage": 2, "round_robin_gradients": True}),
    ("zero1", {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000}),
    # several masters a parameter group, and few parameters or none that stay gathered
    ("zero3", {"stage": 3, "sub_group_size": 2000, "stage3_param_persistence_threshold": 0}),
    ("zero3", {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 100}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "zero"), CONFIGS)
def test_deepspeeds_own_options(ranks: Session, engine: str, zero: dict[str, Any]) -> None:
    cell = f"""
    config = {{"zero_optimization": {zero!r}}}
    training = Training("ddp")
    training.train(0, 3)
    kept = Kept(training)
    training = Training({engine!r}, deepspeed_config=config)
    training.train(0, 3)
    layouts.check_layout(training.model)
    same, complete = apart(training, kept), covered(training.state(owned=True))
    expected = training.train(3, 6)
    other = Training({engine!r}, seed=9, deepspeed_config=config)
    kept.into(other)
    same, complete, apart(other, kept), farthest(expected, other.train(3, 6))
    """
    assert ranks.run(textwrap.dedent(cell)).values[0] == ([], True, [], 0.0)


def test_one_flat_tensor_has_one_count(ranks: Session) -> None:
    cell = """
    training = Training("zero2")
    layout = training.layout
    names = list(layout.weights(owned=True))
    try:
        layout.finalize_state({name: {"step": float(number)} for number, name in enumerate(names)})
    except SwitchError as error:
        found = str(error)
    del training, layout
    found
    """
    found = ranks.run(textwrap.dedent(cell)).values[0]
    assert "was stepped 1 times and others of its parameter group 0 times" in found


@pytest.mark.nightly
def test_a_model_under_zero3_without_an_optimizer(ranks: Session) -> None:
    cell = """
    hardware = accelerators.current_config().hardware
    accelerators.set_options(Options(backend="zero3").validate(hardware))
    accelerator, models, losses = Accelerator(), [], []
    for seed in (0, 4):
        torch.manual_seed(seed)
        models.append(accelerator.prepare(build("adamw")))
        layouts.check_layout(models[-1])
    first, second = (layouts.layout_for(model) for model in models)
    complete = covered(named(first, True))
    moving.reshard(shards.copy_to_host(named(first, True)), named(second, False))
    second.finalize_state({})
    losses = [model(input_ids=tokens[:4], labels=tokens[:4]).item() for model in models]
    for model in models:
        layouts.free_model(model)
    del model, models, first, second
    complete, losses[0] == losses[1]
    """
    assert ranks.run(textwrap.dedent(cell)).values[0] == (True, True)


@pytest.mark.parametrize("engine", engines.each("zero3"))
def test_a_living_engine_takes_state_after_an_evaluation(ranks: Session, engine: str) -> None:
    cell = f"""
    training = Training({engine!r}, "adapters")
    training.train(0, 3)
    kept = Kept(training)
    expected = training.train(3, 5)
    training.train(5, 7)
    training.model.eval()
    with torch.no_grad():
        training.model(input_ids=tokens[:4], labels=tokens[:4])
    before = apart(training, kept)
    kept.into(training)
    len(before) > 0, apart(training, kept), farthest(expected, training.train(3, 5))
    """
    assert ranks.run(textwrap.dedent(cell)).values[0] == (True, [], 0.0)


@pytest.mark.parametrize("engine", engines.each("zero3"))
def test_names_are_those_of_the_bare_model(ranks: Session, engine: str) -> None:
    cell = f"""
    names = sorted(name for name, _ in build("adamw").named_parameters())
    training = Training({engine!r}, "checkpointed")
    training.train(0, 1)
    compiled = torch.compile(training.model, backend="eager")
    layouts.check_layout(compiled)
    layout = layouts.layout_for(compiled, [training.optimizer])
    wrapped = any("_checkpoint" in name for name, _ in training.model.named_parameters())
    same = [sorted(layout.weights(owned=True)) == names, sorted(layout.scalar_state()) == names]
    found = wrapped, *same
    del training, compiled, layout
    found
    """
    assert ranks.run(textwrap.dedent(cell)).values[0] == (True, True, True)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_other_cuts_of_fsdp1(ranks: Session, sharding: str) -> None:
    cell = f"""
    config = {{"sharding_strategy": {sharding!r}}}
    training = Training("fsdp1", fsdp_config=config)
    training.train(0, 3)
    kept, complete = Kept(training), covered(training.state(owned=True))
    expected = training.train(3, 6)
    found = [complete]
    for engine, options in (("fsdp1", {{"fsdp_config": config}}), ("zero3", {{}})):
        other = Training(engine, seed=9, **options)
        kept.into(other)
        found += [apart(other, kept), farthest(expected, other.train(3, 6))]
    found
    """
    assert ranks.run(textwrap.dedent(cell)).values[0] == [True, [], 0.0, [], 0.0]


@pytest.mark.nightly
def test_another_memory_order_is_kept_or_refused(ranks: Session) -> None:
    cell = """
    class Picture(nn.Sequential):
        def forward(self, input_ids, labels):
            image = torch.nn.functional.one_hot(input_ids[:, :16] % 3, 3).float()
            return super().forward(image.view(-1, 3, 4, 4)).square().mean()

    def build(kind):
        layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 2), nn.Conv2d(5, 4, 1)]
        layers[2].requires_grad_(False)
        return Picture(*layers).to(memory_format=torch.channels_last)

    training = Training("ddp")
    training.train(0, 3)
    kept = Kept(training)
    expected = training.train(3, 6)
    other = Training("ddp", seed=9)
    kept.into(other)
    found = [apart(other, kept), farthest(expected, other.train(3, 6))]
    weight = next(other.model.parameters())
    found += [not weight.is_contiguous()]
    try:
        layouts.check_layout(Training("fsdp1").model)
    except SwitchError as error:
        found += [str(error)]
    found
    """
    wrong, far, same_order, refusal = ranks.run(textwrap.dedent(cell)).values[0]
    ranks.run(PRELUDE)
    assert (wrong, far, same_order) == ([], 0.0, True)
    assert "0.weight is not in row-major memory order" in refusal


FREED = textwrap.dedent(
    """
    def reachable():
        '''Bytes of all tensors that the garbage collector can reach.'''
        gc.collect()
        found = {{}}
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and not one.is_meta:
                storage = getattr(one, "_local_tensor", one).untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    held, levels, full = [], [], []
    for _ in range(5):
        training = Training({engine!r}, "adapters")
        training.train(0, 1)
        model, optimizer = training.model, training.optimizer
        held += [model, training.accelerator.unwrap_model(model), optimizer]
        held += list(model.parameters())
        full.append(reachable())
        layouts.free_model(model, [optimizer])
        levels.append(reachable())
    del training, model, optimizer
    held.clear()
    levels, min(full) - levels[0]
    """
)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", engines.each())
def test_a_freed_engine_holds_nothing_though_it_is_held(ranks: Session, engine: str) -> None:
    levels, freed = ranks.run(FREED.format(engine=engine)).values[0]
    assert max(levels) - min(levels) < 1000
    assert freed > 150_000  # bytes of a shard; ZeRO-3's buffers are two gigabytes
