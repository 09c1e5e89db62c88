"""A tape of a forward pass: what autograd keeps, and what its backward allocates.

A model's family writes its operations on a `Tape` once, as its `forward` would run them; the
tape then knows the bytes saved, and the bytes alive at every moment of forward and backward.
The rules are torch's eager autograd: a tensor lives while a later operation needs it or a
node has saved it, a node's saved tensors and its incoming gradient go when it has run,
gradients that meet are added out of place. Casts follow torch.autocast's lists (torch 2.13,
"Automatic Mixed Precision": CUDA and CPU differ).

Pure arithmetic on sizes, about 3 us an operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from nbdist.planner.model_spec import Instant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HALF = 2
FULL = 4
BATCH = 1 << 64
"""A batch size that stands for any: every size is a + b * BATCH, so that one walk over a tape
tells all of them."""


class Tensor:
    """A tensor of a forward pass: its elements, bytes per element, and whose memory it is."""

    __slots__ = ("elements", "elsewhere", "root", "width")

    def __init__(
        self, elements: int, width: int, *, of: Tensor | None = None, elsewhere: bool = False
    ) -> None:
        """Make a tensor, or a view of one; one that is `elsewhere` is not the tape's to count."""
        self.elements, self.width = elements, width
        self.elsewhere = elsewhere
        self.root: Tensor = of.root if of else self

    @property
    def bytes(self) -> int:
        """Bytes of it, or of its gradient."""
        return self.elements * self.width

    @property
    def counted(self) -> int:
        """Bytes of it that a tape counts."""
        return 0 if self.elsewhere else self.bytes


@dataclass(slots=True)
class Node:
    """One operation."""

    out: Tensor
    inputs: tuple[Tensor, ...]
    keeps: tuple[Tensor, ...] = ()
    """Saved for its backward."""
    sends: tuple[Tensor, ...] = ()
    """Inputs that get a gradient of their own."""
    passes: tuple[Tensor, ...] = ()
    """Inputs whose gradient is the incoming one, in the same memory."""
    siblings: tuple[Tensor, ...] = ()
    """Further outputs: slices, whose gradients are put together with that of `out`."""
    weights: int = 0
    """Elements of parameter gradients that its backward makes, for the parameters to keep."""
    workspace: int = 0
    """Bytes that its backward needs at its worst, on top of what it makes."""


@dataclass(slots=True)
class Tape:
    """Operations in forward order."""

    width: int
    """Bytes per element of the parameters, and of what no rule casts."""
    autocast: Literal["cuda", "cpu"] | None = None
    """Whose lists torch.autocast follows, where it runs."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels run."""
    nodes: list[Node] = field(default_factory=list)

    # -- what a family writes with ---------------------------------------------------------

    def cast(self, x: Tensor, width: int) -> Tensor:
        """`x.to(dtype)`."""
        if x.width == width:
            return x
        out = Tensor(x.elements, width)
        return self._add(Node(out, (x,), sends=(x,)))

    def upcast(self, x: Tensor) -> Tensor:
        """What autocast does to the input of an operation that a GPU runs in fp32."""
        return self.cast(x, FULL) if self.autocast == "cuda" else x

    def linear(
        self,
        x: Tensor,
        tokens: int,
        wide: int,
        *,
        narrow: int,
        trainable: bool = True,
        bias: bool = False,
    ) -> Tensor:
        """A matrix product with a weight of wide x narrow; x is (tokens, narrow)."""
        weight: tuple[Tensor, ...] = ()
        if self.autocast:
            if self.width == FULL:
                weight = (self._weight_cast(wide * narrow, trainable=trainable),)
            x = self.cast(x, HALF)
        own = trainable and not weight
        out = Tensor(tokens * wide, x.width)
        keeps = ((x,) if trainable else ()) + weight
        sends = (x,) + (weight if trainable else ())
        made = wide * narrow if own else 0
        made += wide if bias and trainable else 0
        return self._add(Node(out, (x, *weight), keeps=keeps, sends=sends, weights=made))

    def embedding(
        self, tokens: int, rows: int, columns: int, *, counted: bool, tied: bool = False
    ) -> Tensor:
        """Rows of a table.

        The indices are the caller's, as is a gradient that is not counted. A table that is tied
        has one from the head already: a second is made, and their sum.
        """
        out, table = Tensor(tokens * columns, self.width), Tensor(rows * columns, self.width)
        weights = table.elements if counted else 0
        return self._add(Node(out, (), weights=weights, workspace=2 * table.bytes if tied else 0))

    def hold(self, x: Tensor) -> None:
        """Something that the last operation saves as well."""
        self.nodes[-1].keeps += (x,)

    def linger(self, *tensors: Tensor) -> None:
        """Tensors that are still there when the last operation runs, though nothing uses them."""
        self.nodes[-1].inputs += tensors

    def unary(
        self, x: Tensor, *, keeps: Literal["input", "output", "nothing"] = "nothing", width: int = 0
    ) -> Tensor:
        """An elementwise function of one tensor, or a product with what is kept anyway."""
        out = Tensor(x.elements, max(x.width, width))
        kept = {"input": (x,), "output": (out,), "nothing": ()}[keeps]
        return self._add(Node(out, (x,), keeps=kept, sends=(x,)))

    def power(self, x: Tensor) -> Tensor:
        """`x.pow(n)`; its backward makes x^(n-1) and n * x^(n-1) on the way."""
        x = self.upcast(x)
        out = Tensor(x.elements, x.width)
        return self._add(Node(out, (x,), keeps=(x,), sends=(x,), workspace=2 * x.bytes))

    def mean(self, x: Tensor, tokens: int) -> Tensor:
        """A mean over the last dimension."""
        return self._add(Node(Tensor(tokens, x.width), (x,), sends=(x,)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """`x + y` of equal shapes."""
        out = Tensor(x.elements, max(x.width, y.width))
        same = tuple(t for t in (x, y) if t.width == out.width)
        other = tuple(t for t in (x, y) if t.width != out.width)
        return self._add(Node(out, (x, y), sends=other, passes=same))

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """`x * y`; y may be smaller, its gradient is then summed."""
        out = Tensor(x.elements, max(x.width, y.width))
        extra = out.bytes if y.elements < x.elements else 0
        return self._add(Node(out, (x, y), keeps=(x, y), sends=(x, y), workspace=extra))

    def scale_by_weight(self, x: Tensor, elements: int, *, trainable: bool) -> Tensor:
        """`weight * x`, the weight a vector."""
        out = Tensor(x.elements, max(x.width, self.width))
        keeps = (x,) if trainable else ()
        return self._add(
            Node(
                out,
                (x,),
                keeps=keeps,
                sends=(x,),
                weights=elements if trainable else 0,
                workspace=out.bytes if trainable else 0,
            )
        )

    def view(self, x: Tensor) -> Tensor:
        """A view whose gradient has to be copied back into x's layout."""
        return self._add(Node(Tensor(x.elements, x.width, of=x), (x,), sends=(x,)))

    def rows(self, x: Tensor, elements: int) -> Tensor:
        """A slice, which is a view; its gradient is put into one of x's size, zeros elsewhere."""
        return self._add(Node(Tensor(elements, x.width, of=x), (x,), sends=(x,)))

    def copy(self, x: Tensor, times: int = 1) -> Tensor:
        """A contiguous copy of a view, `times` as large when it is repeated."""
        out = Tensor(x.elements * times, x.width)
        if times == 1:
            return self._add(Node(out, (x,), passes=(x,)))
        return self._add(Node(out, (x,), sends=(x,)))

    def split(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """Equal slices, which are views; their gradients are put together in one copy."""
        parts = tuple(Tensor(x.elements // count, x.width, of=x) for _ in range(count))
        self._add(Node(parts[0], (x,), sends=(x,), siblings=parts[1:]))
        return parts

    def biased(self, x: Tensor, gradient: int) -> Tensor:
        """A sum with what all samples share, whose gradient waits from block to block.

        Args:
            x: the larger one.
            gradient: bytes of the other's: a new one is made, and its sum with that of before.
        """
        out = Tensor(x.elements, x.width)
        return self._add(Node(out, (x,), passes=(x,), workspace=2 * gradient))

    def matmul(self, x: Tensor, y: Tensor, elements: int) -> Tensor:
        """A batched matrix product."""
        if self.autocast:
            x, y = self.cast(x, HALF), self.cast(y, HALF)
        out = Tensor(elements, x.width)
        return self._add(Node(out, (x, y), keeps=(x, y), sends=(x, y)))

    def fp32_matmul(self, x: Tensor, y: Tensor, elements: int) -> Tensor:
        """A batched matrix product inside a kernel that computes in fp32."""
        out = Tensor(elements, FULL)
        return self._add(Node(out, (x, y), keeps=(x, y), sends=(x, y)))

    def softmax(self, x: Tensor) -> Tensor:
        """A softmax over the last dimension."""
        return self.unary(self.upcast(x), keeps="output")

    def dropout(self, x: Tensor, rate: float) -> Tensor:
        """Dropout: a GPU keeps one byte an element, a CPU a mask of x's own type."""
        if not rate:
            return x
        mask = Tensor(x.elements, 1 if self.device == "cuda" else x.width)
        out = Tensor(x.elements, x.width)
        return self._add(Node(out, (x, mask), keeps=(mask,), sends=(x,)))

    def layer_norm(self, x: Tensor, tokens: int, columns: int, *, trainable: bool) -> Tensor:
        """Torch's layer norm; keeps its input, mean and 1/std."""
        x = self.upcast(x)
        out = Tensor(x.elements, x.width)
        statistics = Tensor(2 * tokens, x.width if self.device == "cpu" else FULL)
        return self._add(
            Node(
                out,
                (x, statistics),
                keeps=(x, statistics),
                sends=(x,),
                weights=2 * columns if trainable else 0,
            )
        )

    def rms_norm(self, x: Tensor, tokens: int, columns: int, *, trainable: bool) -> Tensor:
        """The RMSNorm of transformers' models, operation by operation, in fp32 inside."""
        wide = self.cast(x, FULL)
        squares = self.mean(self.power(wide), tokens)
        inverse = self.unary(self.unary(squares, keeps="nothing"), keeps="output")
        normed = self.cast(self.multiply(wide, inverse), x.width)
        return self.scale_by_weight(normed, columns, trainable=trainable)

    def flash_attention(self, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        """Fused attention; keeps q, k, v, its output, and fp32 log-sums of `rows`."""
        if self.autocast:
            q, k, v = (self.cast(t, HALF) for t in (q, k, v))
        out, sums = Tensor(q.elements, q.width), Tensor(rows, FULL)
        return self._add(Node(out, (q, k, v, sums), keeps=(q, k, v, out, sums), sends=(q, k, v)))

    # -- what is read off ------------------------------------------------------------------

    def saved(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(t.counted for t in self._kept())

    def keeps(self, x: Tensor) -> bool:
        """Whether a node saves a tensor's memory."""
        return x.root in self._kept()

    def forward(self, first: Tensor | None = None) -> int:
        """Most bytes alive inside the forward with what it keeps.

        `first` is its input, which whoever runs it holds until it is over.
        """
        return self._forward(keeping=True, first=first)

    def forward_only(self, first: Tensor) -> int:
        """Most bytes alive inside a forward that keeps nothing."""
        return self._forward(keeping=False, first=first)

    def backward(self, incoming: int, held: int = 0) -> tuple[Instant, ...]:
        """The worst moments of the backward.

        Args:
            incoming: bytes of the gradient that comes in.
            held: bytes kept all along besides, such as a checkpointed input.
        """
        return worst(_Backward(self.nodes, incoming, held).instants())

    # -- how -------------------------------------------------------------------------------

    def _add(self, node: Node) -> Tensor:
        self.nodes.append(node)
        return node.out

    def _weight_cast(self, elements: int, *, trainable: bool) -> Tensor:
        """The bf16 copy that autocast makes of a weight; its gradient is cast back."""
        copy = Tensor(elements, HALF)
        return self._add(Node(copy, (), weights=elements if trainable else 0))

    def _kept(self) -> dict[Tensor, None]:
        """Memory that nodes save, each once."""
        return {t.root: None for node in self.nodes for t in node.keeps}

    def _forward(self, *, keeping: bool, first: Tensor | None) -> int:
        kept = (set(self._kept()) if keeping else set()) | ({first} if first else set())
        last: dict[Tensor, int] = {}
        for number, node in enumerate(self.nodes):
            for tensor in node.inputs:
                last[tensor.root] = number
        alive = first.bytes if first else 0
        seen = {first} if first else set()
        peak = alive
        for number, node in enumerate(self.nodes):
            made = {t.root for t in (node.out, *node.inputs)} - seen
            seen |= made
            alive += sum(t.counted for t in made)
            peak = max(peak, alive)
            for tensor in {t.root for t in node.inputs}:
                if last[tensor] == number and tensor not in kept:
                    alive -= tensor.counted
        return peak


class _Backward:
    """The engine's walk back over the nodes, and what is alive on the way."""

    def __init__(self, nodes: Sequence[Node], incoming: int, held: int) -> None:
        self.nodes = nodes
        self.uses = Counter(t.root for node in nodes for t in node.keeps)
        self.alive = held + incoming + sum(tensor.counted for tensor in self.uses)
        self.grads = 0
        self.waiting: dict[Tensor, _Gradient] = {nodes[-1].out: _Gradient(incoming)}

    def instants(self) -> Iterator[Instant]:
        """Every moment at which something is allocated."""
        yield self.now()
        for node in reversed(self.nodes):
            gradient = self.waiting.pop(node.out, None)
            if gradient is not None:
                yield from self.run(node, gradient)

    def now(self, more: int = 0) -> Instant:
        """What is alive."""
        return Instant(self.alive + more, self.grads)

    def run(self, node: Node, gradient: _Gradient) -> Iterator[Instant]:
        """Make gradients, let go of what the node had, hand the gradients on."""
        slices = [self.waiting.pop(part) for part in node.siblings]
        sent = [(tensor, _Gradient(tensor.bytes)) for tensor in node.sends]
        self.alive += sum(tensor.bytes for tensor in node.sends)
        gradient.owners += len(node.passes)
        sent += [(tensor, gradient) for tensor in node.passes]
        self.grads += node.weights
        yield self.now(node.workspace)
        self.alive -= gradient.drop() + sum(part.drop() for part in slices)
        for tensor in node.keeps:
            self.uses[tensor.root] -= 1
            self.alive -= 0 if self.uses[tensor.root] else tensor.root.counted
        for tensor, new in sent:
            yield from self.deliver(tensor, new)

    def deliver(self, tensor: Tensor, new: _Gradient) -> Iterator[Instant]:
        """Hand a gradient to the node that made a tensor; a second one is added to the first."""
        old = self.waiting.get(tensor)
        if old is None:
            self.waiting[tensor] = new
            return
        self.alive += tensor.bytes
        yield self.now()
        self.alive -= old.drop() + new.drop()
        self.waiting[tensor] = _Gradient(tensor.bytes)


class _Gradient:
    """Memory of a gradient on its way, and how many are waiting with it."""

    __slots__ = ("bytes", "owners")

    def __init__(self, size: int) -> None:
        self.bytes, self.owners = size, 1

    def drop(self) -> int:
        """Let one owner go; the bytes that are freed by it."""
        self.owners -= 1
        return 0 if self.owners else self.bytes


def worst(instants: Iterable[Instant]) -> tuple[Instant, ...]:
    """The instants that no other one exceeds in every respect, whatever the batch size."""
    best: list[tuple[int, Instant]] = []
    for one in sorted(set(instants), reverse=True):
        fixed = one.held % BATCH
        # Sorted, so that each of an earlier one is as large or larger.
        if not any(f >= fixed and i.grads >= one.grads for f, i in best):
            best.append((fixed, one))
    return tuple(one for _, one in best)
