"""Where six engines keep the state, on two real CPU ranks: all of it moves between all of them.

One session and one living process a rank; the cells run nbdist's own code.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from nbdist import Session

ENGINES = list(STRATEGIES)
BEFORE, AFTER = 3, 3
"""Optimizer steps before and after a move."""

PRELUDE = textwrap.dedent(
    """
    import gc, math
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel
    from nbdist.errors import SwitchError
    from nbdist.rank import accelerator as accelerators
    from nbdist.state import digest, layouts, moving, shards
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

    def gpt2():
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=211, n_embd=45, n_head=3, n_layer=2, n_positions=24, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        ))

    def build(kind):
        if kind == "adapters":
            model = Parts(gpt2())
            model.base.requires_grad_(False)
            model.base.transformer.h[1].mlp.requires_grad_(True)
            return model
        return Whole(gpt2())

    def optimizer_for(kind, model):
        trained = [one for one in model.parameters() if one.requires_grad]
        if kind == "adagrad":
            return torch.optim.Adagrad(trained, lr=1e-2)
        groups = [
            {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
        ]
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
        return torch.optim.AdamW(groups, lr=3e-3)

    class Training:
        '''A model under an engine, in this process.'''

        def __init__(self, backend, kind="adamw", seed=0, **options):
            hardware = accelerators.current().hardware
            accelerators.adopt(Options(backend=backend, **options).checked(hardware))
            # the weight without a gradient: DDP wants to know
            handlers = [DistributedDataParallelKwargs(find_unused_parameters=kind == "adapters")]
            self.accelerator = Accelerator(kwargs_handlers=handlers)
            torch.manual_seed(seed)
            model = build(kind)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer_for(kind, model))
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
            return layouts.of(self.model, [self.optimizer])

        def state(self, owned):
            return named(self.layout, owned)

        def buffers(self):
            inner = self.accelerator.unwrap_model(self.model)
            return [one for _, one in inner.named_buffers()]

    def named(layout, owned):
        found = {f"model.{name}": one for name, one in layout.weights(owned=owned).items()}
        for name, states in layout.states(owned=owned).items():
            found |= {f"optim.state.{name}.{state}": one for state, one in states.items()}
        return found

    class Kept:
        '''What a switch takes with it.'''

        def __init__(self, training):
            self.shards = shards.snapshot(training.state(owned=True))
            self.counts = training.layout.counts()
            self.buffers = [one.clone() for one in training.buffers()]
            self.digests = digest.agreed(self.shards)
            self.names = {}
            for key, (shape, dtype) in moving.catalogue(self.shards).items():
                if key.startswith("optim.state."):
                    name, _, state = key.removeprefix("optim.state.").rpartition(".")
                    self.names.setdefault(name, {})[state] = dtype

        def into(self, training):
            layout = training.layout
            layout.allocate(self.names)
            sent = moving.move(self.shards, named(layout, owned=False))
            layout.settle(self.counts)
            for one, old in zip(training.buffers(), self.buffers, strict=True):
                one.copy_(old)
            return sent

    def differing(one, two):
        return sorted(key for key in one.keys() | two.keys() if one.get(key, 0) != two.get(key, 0))

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
MATRIX = textwrap.dedent(
    """
    sources, targets, kind, options, trained = {sources!r}, {targets!r}, {kind!r}, {options!r}, {before}
    kept, losses, problems, fractions, worst = {{}}, {{}}, [], {{}}, 0.0
    for source in sources:
        training = Training(source, kind, **options)
        layouts.check(training.model)
        training.train(0, trained)
        kept[source] = Kept(training)
        if not covered(training.state(owned=True)):
            problems.append((source, "not covered"))
        losses[source] = training.train(trained, trained + {after})
        del training
    for source in sources:
        for target in targets:
            training = Training(target, kind, seed=999, **options)
            total = shards.bytes_of(kept[source].shards)
            fractions[source, target] = kept[source].into(training) / total
            state = training.state(owned=True)
            types = {{key: one.dtype for key, one in state.items()}}
            wrong = differing(digest.agreed(state), digest.agreed(kept[source].shards, dtypes=types))
            if wrong:
                problems.append((source, target, len(wrong), wrong[:4]))
            counts = training.layout.counts()
            if any(counts.get(n) != c for n, c in kept[source].counts.items()):
                problems.append((source, target, "counts"))
            now = training.train(trained, trained + {after})
            worst = max(worst, *(abs(a - b) for a, b in zip(now, losses.get(target, losses[source]), strict=True)))
            del training
    [problems, worst, fractions,
     {{engine: differing(one.digests, kept[sources[0]].digests) for engine, one in kept.items()}}]
    """
)


@pytest.fixture(scope="module")
def ranks(session: Session) -> Session:
    """Two CPU ranks with models and a way to change the engine."""
    session.run(PRELUDE)
    return session


def matrix(ranks: Session, kind: str, **options: Any) -> list[Any]:
    """Problems, the largest difference of losses, fractions sent, keys that differ from DDP's."""
    before = options.pop("before", BEFORE)
    named = {"sources": options.pop("sources", ENGINES), "targets": options.pop("targets", ENGINES)}
    code = MATRIX.format(**named, kind=kind, options=options, before=before, after=AFTER)
    found: list[Any] = ranks.run(code).values[0]
    return found


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad", "adapters"])
def test_all_state_moves_between_all_engines(ranks: Session, kind: str) -> None:
    problems, worst, _, apart = matrix(ranks, kind)
    assert problems == []
    assert worst <= 1e-6
    assert apart == {engine: [] for engine in ENGINES}
