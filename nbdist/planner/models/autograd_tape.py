"""Records a forward pass to compute what autograd saves and what its backward allocates.

A model family records the operations of its `forward` once; the tape then returns the saved bytes
and the bytes alive at every moment of forward and backward. It follows torch's eager autograd: a
tensor lives while a later operation needs it or a node has saved it, a node's saved tensors and
incoming gradient are freed after it has run, and gradients of the same tensor are added out of
place. Casts follow torch.autocast's lists (torch 2.13, "Automatic Mixed Precision"; CUDA and CPU
differ).

Pure arithmetic on sizes, about 3 us per operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.planner.model_spec import BackwardPeakCandidate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.planner.model_spec import FrozenSaves

HALF_BYTES = 2
FULL_BYTES = 4
RNG_STATE_BYTES = 5056
"""Bytes of the state of torch's CPU generator. A checkpointed block keeps a copy."""
QuantizationMethod = Literal["nf4", "int8"]
NF4_BLOCK = 64
"""Elements that share a scale."""
SYMBOLIC_BATCH_SIZE = 1 << 64
"""Symbolic batch size: every size is a + b * SYMBOLIC_BATCH_SIZE, so that one walk over a tape
holds for all batch sizes."""


class TapeTensor:
    """Elements, bytes per element and storage of a tensor of a forward pass."""

    __slots__ = ("elements", "needs_grad", "root", "size_bytes", "width")

    def __init__(
        self,
        elements: int,
        width: int,
        *,
        of: TapeTensor | None = None,
        needs_grad: bool = False,
    ) -> None:
        """Make a tensor, or a view of another one; an operation's result inherits `needs_grad`."""
        self.elements, self.width, self.needs_grad = elements, width, needs_grad
        self.root: TapeTensor = of.root if of else self
        self.size_bytes = elements * width  # of its gradient, too


@dataclass(slots=True)
class TapeNode:
    """One operation."""

    out: TapeTensor
    inputs: tuple[TapeTensor, ...]
    keeps: tuple[TapeTensor, ...] = ()
    """Tensors saved for the backward."""
    attributes: tuple[TapeTensor, ...] = ()
    """Tensors that it saves as plain attributes: they live as long as the graph, and checkpointing
    does not drop them."""
    sends: tuple[TapeTensor, ...] = ()
    """Inputs that get a new gradient."""
    passes: tuple[TapeTensor, ...] = ()
    """Inputs whose gradient is the incoming one, in the same memory."""
    siblings: tuple[TapeTensor, ...] = ()
    """Further outputs: slices, whose gradients are concatenated with that of `out`."""
    weights: int = 0
    """Elements of parameter gradients that its backward makes."""
    workspace: int = 0
    """Peak bytes that its backward needs in addition to the gradients it makes."""
    has_matrix: bool = False
    """True for a product with a matrix of parameters."""


@dataclass(slots=True)
class AutogradTape:
    """Operations in forward order."""

    element_bytes: int
    """Bytes per element of the parameters, and of everything that is not cast."""
    autocast: Literal["cuda", "cpu"] | None = None
    """Device whose autocast lists apply; None without autocast."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device whose kernels run."""
    frozen_saves: FrozenSaves = "nothing"
    """Layers that save their input although their weight is frozen."""
    nodes: list[TapeNode] = field(default_factory=list)

    # -- recording -------------------------------------------------------------------------

    def cast(self, x: TapeTensor, width: int) -> TapeTensor:
        """Record `x.to(dtype)`."""
        if x.width == width:
            return x
        out = TapeTensor(x.elements, width)
        return self.add_node(TapeNode(out, (x,), sends=(x,)))

    def upcast(self, x: TapeTensor) -> TapeTensor:
        """Record autocast's cast of an input of an operation that a GPU runs in fp32."""
        return self.cast(x, FULL_BYTES) if self.autocast == "cuda" else x

    def linear(
        self,
        x: TapeTensor,
        tokens: int,
        wide: int,
        *,
        narrow: int,
        trainable: bool = True,
        bias: bool = False,
        element_bytes: int | None = None,
    ) -> TapeTensor:
        """Record a product with a wide x narrow weight; x is (tokens, narrow).

        The weight has `element_bytes` bytes per element, by default the tape's.
        """
        weight: tuple[TapeTensor, ...] = ()
        if self.autocast:
            if (element_bytes or self.element_bytes) == FULL_BYTES:
                # The bf16 copy of the weight, whose gradient is cast back.
                copy = TapeTensor(wide * narrow, HALF_BYTES)
                grad_elements = wide * narrow if trainable else 0
                weight = (self.add_node(TapeNode(copy, (), weights=grad_elements)),)
            x = self.cast(x, HALF_BYTES)
        # FSDP1's flat parameter takes a gradient of frozen weights, too.
        own = (trainable or self.frozen_saves == "all") and not weight
        out = TapeTensor(tokens * wide, x.width)
        saved = (x,) if trainable or self.frozen_saves != "nothing" else ()
        keeps = (*saved, *(weight if x.needs_grad else ()))
        sends = (x,) + (weight if trainable else ())
        grad_elements = wide * narrow if own else 0
        grad_elements += wide if bias and trainable else 0
        return self.add_node(
            TapeNode(
                out,
                (x, *weight),
                keeps=keeps,
                sends=sends,
                weights=grad_elements,
                has_matrix=True,
            )
        )

    def quantized_linear(
        self, x: TapeTensor, tokens: int, wide: int, *, narrow: int, method: QuantizationMethod
    ) -> TapeTensor:
        """Record a product with a frozen weight of 4 or 8 bits, by bitsandbytes 0.50.

        nf4 (MatMul4Bit) restores the weight for the product, also in the backward, and saves
        nothing. int8 saves the input as an attribute; a CPU restores the weight (MatMul8bitFp), a
        GPU quantizes the input instead (MatMul8bitLt: its fp16 copy, its int8 values, the int32
        product).
        """
        weight = wide * narrow
        restored = weight * x.width
        if method == "nf4":
            restored += FULL_BYTES * (weight // NF4_BLOCK)
        out = TapeTensor(tokens * wide, x.width)
        in_forward = in_backward = restored
        if method == "int8" and self.device == "cpu" and x.width == HALF_BYTES:
            restored += 2 * FULL_BYTES * weight  # mul_ with the fp32 scales makes two fp32 copies
            # before the product
            in_forward = max(in_forward, restored - out.size_bytes)
            in_backward = max(in_backward, restored - x.size_bytes)
        if method == "int8" and self.device == "cuda":
            in_forward = (HALF_BYTES + 1) * x.elements + FULL_BYTES * tokens * wide
        keeps = (x,) if method == "int8" else ()
        return self.add_node(
            TapeNode(
                out,
                (x, TapeTensor(in_forward, 1)),
                keeps=keeps,
                attributes=keeps,
                sends=(x,),
                workspace=in_backward,
            )
        )

    def embedding(
        self,
        tokens: int,
        rows: int,
        columns: int,
        *,
        counted: bool,
        tied: bool = False,
        trainable: bool = True,
    ) -> TapeTensor:
        """Record an embedding lookup.

        The indices belong to the caller, as does a gradient that is not counted. A tied table
        already has a gradient from the head: a second one is made and, unless autocast made the
        first by a cast, their sum. Autograd adds in place to a gradient that nothing shares.
        """
        out, table = (
            TapeTensor(tokens * columns, self.element_bytes, needs_grad=trainable),
            TapeTensor(rows * columns, self.element_bytes),
        )
        weights = table.elements if counted else 0
        is_cast = self.autocast and self.element_bytes == FULL_BYTES
        # The head's gradient is a view, except of ZeRO-3's linear layer.
        is_unshared = is_cast or self.frozen_saves == "linear"
        copies = 0 if not tied else 1 if is_unshared else 2
        return self.add_node(
            TapeNode(out, (), weights=weights, workspace=copies * table.size_bytes)
        )

    def save_for_backward(self, x: TapeTensor) -> None:
        """Add a tensor to those that the last operation saves."""
        self.nodes[-1].keeps += (x,)

    def keep_alive(self, *tensors: TapeTensor) -> None:
        """Keep tensors alive until the last operation, though nothing uses them."""
        self.nodes[-1].inputs += tensors

    def unary(
        self,
        x: TapeTensor,
        *,
        keeps: Literal["input", "output", "nothing"] = "nothing",
        width: int = 0,
    ) -> TapeTensor:
        """Record an elementwise function of one tensor, or a product with a kept tensor."""
        out = TapeTensor(x.elements, max(x.width, width))
        saved = {"input": (x,), "output": (out,), "nothing": ()}[keeps]
        return self.add_node(TapeNode(out, (x,), keeps=saved, sends=(x,)))

    def power(self, x: TapeTensor) -> TapeTensor:
        """Record `x.pow(n)`; its backward makes x^(n-1) and n * x^(n-1) on the way."""
        x = self.upcast(x)
        out = TapeTensor(x.elements, x.width)
        return self.add_node(
            TapeNode(out, (x,), keeps=(x,), sends=(x,), workspace=2 * x.size_bytes)
        )

    def add(self, x: TapeTensor, y: TapeTensor) -> TapeTensor:
        """Record `x + y` of equal shapes."""
        out = TapeTensor(x.elements, max(x.width, y.width))
        same = tuple(t for t in (x, y) if t.width == out.width)
        other = tuple(t for t in (x, y) if t.width != out.width)
        return self.add_node(TapeNode(out, (x, y), sends=other, passes=same))

    def multiply(self, x: TapeTensor, y: TapeTensor) -> TapeTensor:
        """Record `x * y`; y may be smaller, its gradient is then summed."""
        out = TapeTensor(x.elements, max(x.width, y.width))
        extra = out.size_bytes if y.elements < x.elements and y.needs_grad else 0
        return self.add_node(
            TapeNode(out, (x, y), keeps=_operands(x, y), sends=(x, y), workspace=extra)
        )

    def view(self, x: TapeTensor) -> TapeTensor:
        """Record a view whose gradient has to be copied back into x's layout."""
        return self.add_node(TapeNode(TapeTensor(x.elements, x.width, of=x), (x,), sends=(x,)))

    def copy(self, x: TapeTensor, times: int = 1) -> TapeTensor:
        """Record a contiguous copy of a view, `times` as large if it is repeated."""
        out = TapeTensor(x.elements * times, x.width)
        if times == 1:
            return self.add_node(TapeNode(out, (x,), passes=(x,)))
        return self.add_node(TapeNode(out, (x,), sends=(x,)))

    def split(self, x: TapeTensor, count: int) -> tuple[TapeTensor, ...]:
        """Record equal slices, views whose gradients are concatenated."""
        parts = tuple(TapeTensor(x.elements // count, x.width, of=x) for _ in range(count))
        self.add_node(TapeNode(parts[0], (x,), sends=(x,), siblings=parts[1:]))
        return parts

    def matmul(
        self, x: TapeTensor, y: TapeTensor, elements: int, *, in_kernel: bool = False
    ) -> TapeTensor:
        """Record a batched matrix product; `in_kernel`: inside a kernel that computes in fp32."""
        if self.autocast and not in_kernel:
            x, y = self.cast(x, HALF_BYTES), self.cast(y, HALF_BYTES)
        out = TapeTensor(elements, FULL_BYTES if in_kernel else x.width)
        return self.add_node(TapeNode(out, (x, y), keeps=_operands(x, y), sends=(x, y)))

    def softmax(self, x: TapeTensor) -> TapeTensor:
        """Record a softmax over the last dimension."""
        return self.unary(self.upcast(x), keeps="output")

    def dropout(self, x: TapeTensor, rate: float) -> TapeTensor:
        """Record dropout: a GPU keeps one byte per element, a CPU a mask of x's dtype."""
        if not rate:
            return x
        mask = TapeTensor(x.elements, 1 if self.device == "cuda" else x.width)
        out = TapeTensor(x.elements, x.width)
        return self.add_node(TapeNode(out, (x, mask), keeps=(mask,), sends=(x,)))

    def layer_norm(
        self, x: TapeTensor, tokens: int, columns: int, *, trainable: bool
    ) -> TapeTensor:
        """Record torch's layer norm, which keeps its input, mean and 1/std."""
        x = self.upcast(x)
        out = TapeTensor(x.elements, x.width)
        statistics = TapeTensor(2 * tokens, x.width if self.device == "cpu" else FULL_BYTES)
        return self.add_node(
            TapeNode(
                out,
                (x, statistics),
                keeps=(x, statistics),
                sends=(x,),
                weights=2 * columns if trainable else 0,
            )
        )

    def rms_norm(self, x: TapeTensor, tokens: int, columns: int, *, trainable: bool) -> TapeTensor:
        """Record the RMSNorm of transformers, operation by operation, in fp32 inside."""
        wide = self.cast(x, FULL_BYTES)
        squares = self.power(wide)
        mean = TapeTensor(tokens, squares.width)
        self.add_node(TapeNode(mean, (squares,), sends=(squares,)))
        inverse = self.unary(self.unary(mean), keeps="output")
        normed = self.cast(self.multiply(wide, inverse), x.width)
        # The product with the weight vector.
        out = TapeTensor(normed.elements, max(normed.width, self.element_bytes))
        return self.add_node(
            TapeNode(
                out,
                (normed,),
                keeps=(normed,) if trainable or self.frozen_saves == "all" else (),
                sends=(normed,),
                weights=columns if trainable else 0,
                workspace=out.size_bytes if trainable else 0,
            )
        )

    def flash_attention(self, q: TapeTensor, k: TapeTensor, v: TapeTensor, rows: int) -> TapeTensor:
        """Record fused attention, which keeps q, k, v, its output, and fp32 log-sums of `rows`."""
        if self.autocast:
            q, k, v = (self.cast(t, HALF_BYTES) for t in (q, k, v))
        out, sums = TapeTensor(q.elements, q.width), TapeTensor(rows, FULL_BYTES)
        return self.add_node(
            TapeNode(out, (q, k, v, sums), keeps=(q, k, v, out, sums), sends=(q, k, v))
        )

    # -- results ---------------------------------------------------------------------------

    def saved_bytes(self) -> int:
        """Return the bytes saved from forward to backward."""
        return sum(t.size_bytes for t in self._saved_tensors())

    def attribute_bytes(self) -> int:
        """Return the bytes that nodes save as plain attributes."""
        return sum(t.size_bytes for t in self._attributes())

    def is_saved(self, x: TapeTensor) -> bool:
        """Return whether a node saves a tensor's memory."""
        return x.root in self._saved_tensors()

    def forward_peaks(
        self,
        first: TapeTensor | None = None,
        *,
        is_recomputed: bool = False,
        stop: int | None = None,
    ) -> list[int]:
        """Return the peak bytes until the second matrix is used, from there to the third, ...

        Args:
            first: its input, which the caller holds until the forward ends.
            is_recomputed: it is recomputed later, and saves plain attributes only.
            stop: number of operations that run; all by default.
        """
        saved = set(self._attributes() if is_recomputed else self._saved_tensors())
        last: dict[TapeTensor, int] = {}
        for number, node in enumerate(self.nodes):
            for tensor in node.inputs:
                last[tensor.root] = number
        alive = first.size_bytes if first else 0
        seen = {first} if first else set()
        kept = saved | seen
        peaks = [alive]
        num_matrices = 0
        for number, node in enumerate(self.nodes[:stop]):
            num_matrices += node.has_matrix
            if num_matrices > len(peaks):
                peaks.append(alive)
            created = {t.root for t in (node.out, *node.inputs)} - seen
            seen |= created
            alive += sum(t.size_bytes for t in created)
            peaks[-1] = max(peaks[-1], alive)
            for tensor in {t.root for t in node.inputs}:
                if last[tensor] == number and tensor not in kept:
                    alive -= tensor.size_bytes
        return peaks

    def run_backward(
        self, incoming: int, checkpointed: TapeTensor | None = None
    ) -> BackwardMoments:
        """Return the moments of the backward that may be its peak, and those of gradients.

        Args:
            incoming: bytes of the incoming gradient.
            checkpointed: input of a checkpointed block, which saves nothing else.

        Plain attributes are not counted: all of the model's are alive in the whole backward.
        """
        recomputation = self._recomputation(checkpointed) if checkpointed else None
        moments, gradients = _run_backward(self.nodes, incoming, recomputation)
        return BackwardMoments(worst_moments(moments), tuple(gradients))

    # -- implementation --------------------------------------------------------------------

    def add_node(self, node: TapeNode) -> TapeTensor:
        """Append an operation; without a gradient to make, it saves nothing."""
        sends = tuple(t for t in node.sends if t.needs_grad)
        passes = tuple(t for t in node.passes if t.needs_grad)
        if not (sends or passes or node.weights or node.out.needs_grad):
            node.keeps = node.attributes = ()
        else:
            for part in (node.out, *node.siblings):
                part.needs_grad = True
        node.sends, node.passes = sends, passes
        self.nodes.append(node)
        return node.out

    def _recomputation(self, first: TapeTensor) -> _Recomputation:
        """Return where torch 2.13 runs a checkpointed forward again, and the peak of that.

        It begins when the backward first needs a saved tensor, and ends when the last one is saved
        (`early_stop`); an operation saves its inputs before it runs.
        """
        saving = [n for n, node in enumerate(self.nodes) if {*node.keeps} - {*node.attributes}]
        last = self.nodes[saving[-1]]
        peak = max(self.forward_peaks(first, stop=saving[-1] + (last.out in last.keeps)))
        peak += RNG_STATE_BYTES if self.device == "cpu" else 0
        return _Recomputation(last, first, peak - first.size_bytes)

    def _attributes(self) -> dict[TapeTensor, None]:
        return {t.root: None for node in self.nodes for t in node.attributes}

    def _saved_tensors(self) -> dict[TapeTensor, None]:
        return {t.root: None for node in self.nodes for t in node.keeps}


class BackwardMoments(NamedTuple):
    """Moments of a backward."""

    peaks: tuple[BackwardPeakCandidate, ...]
    """Those that may be its peak."""
    gradients: tuple[BackwardPeakCandidate, ...]
    """Those at which gradients of parameters are complete, in order."""


def _operands(x: TapeTensor, y: TapeTensor) -> tuple[TapeTensor, ...]:
    """Return the factors that a product saves: each for the other one's gradient."""
    return ((x,) if y.needs_grad else ()) + ((y,) if x.needs_grad else ())


class _Recomputation(NamedTuple):
    """A forward that runs again in the backward."""

    before: TapeNode
    """Operation whose backward needs it first."""
    input: TapeTensor
    peak_bytes: int
    """Peak inside it, besides its input."""


def _run_backward(
    nodes: Sequence[TapeNode], incoming: int, recomputation: _Recomputation | None
) -> tuple[list[BackwardPeakCandidate], list[BackwardPeakCandidate]]:
    """Walk back over the nodes as autograd does.

    Returns:
        All moments, and those at which gradients of weights are complete. A node's own are
        accumulated after it has run.
    """
    # Those of a forward that runs again are other tensors, and freed with its graph.
    attributes = {t.root for node in nodes for t in node.attributes if not recomputation}
    uses = Counter(
        t.root
        for node in nodes
        for t in node.keeps
        if t not in node.attributes and t.root not in attributes
    )
    is_saved = recomputation is None
    saved = [recomputation.input] if recomputation else uses
    alive = incoming + sum(tensor.size_bytes for tensor in saved)
    grads = 0
    moments = [BackwardPeakCandidate(alive, 0)]
    gradients: list[BackwardPeakCandidate] = []
    waiting = {nodes[-1].out: _PendingGradient(incoming)}
    for node in reversed(nodes):
        if recomputation and node is recomputation.before:
            is_saved = True
            moments.append(BackwardPeakCandidate(alive + recomputation.peak_bytes, grads))
            again = (tensor for tensor in +uses if tensor is not recomputation.input)
            alive += sum(tensor.size_bytes for tensor in again)
        gradient = waiting.pop(node.out, None)
        if gradient is None:
            continue
        slices = [waiting.pop(part) for part in node.siblings]
        sent = [(tensor, _PendingGradient(tensor.size_bytes)) for tensor in node.sends]
        alive += sum(tensor.size_bytes for tensor in node.sends)
        gradient.owners += len(node.passes)
        sent += [(tensor, gradient) for tensor in node.passes]
        grads += node.weights
        moments.append(BackwardPeakCandidate(alive + node.workspace, grads, node.weights))
        alive -= gradient.drop() + sum(part.drop() for part in slices)
        for tensor in node.keeps:
            if tensor.root in uses and tensor not in node.attributes:
                uses[tensor.root] -= 1
                alive -= tensor.root.size_bytes if is_saved and not uses[tensor.root] else 0
        if node.weights:
            gradients.append(BackwardPeakCandidate(alive, grads))
        for tensor, new in sent:
            old = waiting.get(tensor)
            if old is None:
                waiting[tensor] = new
                continue
            # The sum with the gradient of a later use.
            alive += tensor.size_bytes
            moments.append(BackwardPeakCandidate(alive, grads, node.weights))
            alive -= old.drop() + new.drop()
            waiting[tensor] = _PendingGradient(tensor.size_bytes)
    return moments, gradients


@dataclass(eq=False, slots=True)
class _PendingGradient:
    """Memory of a pending gradient and its number of owners."""

    bytes: int
    owners: int = 1

    def drop(self) -> int:
        """Remove one owner; return the bytes that are freed."""
        self.owners -= 1
        return 0 if self.owners else self.bytes


def worst_moments(moments: Iterable[BackwardPeakCandidate]) -> tuple[BackwardPeakCandidate, ...]:
    """Return the moments that no other one exceeds in every respect, for any batch size."""
    best: list[tuple[int, BackwardPeakCandidate]] = []
    for moment in sorted(set(moments), reverse=True):
        held, grads, new = moment
        fixed = held % SYMBOLIC_BATCH_SIZE
        # Sorted, so that each part of an earlier one is as large or larger.
        if not any(f >= fixed and g >= grads and n >= new for f, (_, g, n) in best):
            best.append((fixed, moment))
    return tuple(moment for _, moment in best)
