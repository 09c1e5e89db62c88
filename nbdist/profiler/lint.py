"""Lints the source of the profiled cell: six rules, each confirmed by the measurements.

A rule reports only what the profile has measured; the source of the cell shows where it comes from.
Nothing is run, and no function that the cell calls is followed.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.profiler.dataloader_call import (
    calls,
    find_loader,
    find_trainer_arguments,
    last_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.measurements import RankProfile

LintKind = Literal["num_workers", "pin_memory", "sharding", "fp16", "sync", "train_mode"]

SourceLine = tuple[str, int, str]
"""Name of the cell, number of the line, its stripped text."""

Confidence = Literal["certain", "likely"]
"""Confidence: certain if measured or shown by the text, likely if true in nearly all cases."""

_MAX_CELLS = 64
_MIN_STEP_SHARE = 0.02
"""Share of the step below which a wait for the device is not reported."""
_MIN_LOADER_SHARE = 0.10
"""The same for data loading, which every loop waits for a little. Slightly lower than the
threshold of the verdict."""
_PYTHON_INSIDE = ("%%distribute", "%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose body is Python."""
_SAME_TENSOR = frozenset({"detach", "mean", "sum", "clone", "float", "abs", "max", "min", "norm"})
"""Tensor methods that return a tensor."""
_GATHERS = frozenset({"gather", "gather_for_metrics", "reduce"})
"""Accelerator methods that return tensors on the device."""
_NO_TENSOR = frozenset({"shape", "ndim", "dtype", "device", "grad_fn", "requires_grad"})
_OUTPUT_FUNCTIONS = frozenset({"print", "set_postfix", "set_description", "info", "write"})
_HOST_MODULES = frozenset({"math", "np", "numpy", "pd", "random", "statistics", "time"})
"""Modules whose functions return values in host memory."""
_TRUE_ON_A_RANK = frozenset(
    {
        "accelerator",
        "is_local_main_process",
        "is_main_process",
        "local_rank",
        "process_index",
        "rank",
        "sync_gradients",
        "verbose",
    }
)
"""Names in conditions that hold in every iteration on some rank."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Something in the text of a cell that costs time or is wrong."""

    kind: LintKind
    cell: str
    """Name of the cell, such as "In[3]"."""
    line: int
    source: str
    """Stripped text of the line."""
    reason: str
    """The problem and its measured cost."""
    change: str
    """What to write instead: code to paste, or a sentence."""
    sure: Confidence
    seconds: float = 0.0
    """Measured cost in seconds per step, an upper bound of the gain."""


# ------------------------------------------------------------------------------ the cell


class TrainingCellVisitor(ast.NodeVisitor):
    """The last cell: its training loops, the calls in them that wait for the device, its loader.

    Use ``read_training_cell``.
    """

    def __init__(self, name: str, lines: Sequence[str]) -> None:
        self.name = name
        """Name of the cell, such as "In[3]"."""
        self.lines = lines
        self.train_line = 0
        """Line of the first training loop or of `trainer.train()`; 0 if there is none."""
        self.loader: DataLoaderCall | None = None
        """Source of the loader; None if it is unknown or ambiguous."""
        self.waits: dict[int, tuple[str, Confidence]] = {}
        """Line -> call that waits for the device in every iteration, such as ".item()"."""
        self.iterables: list[ast.expr] = []
        """Expressions that the training loops take their batches from."""
        self.other_iterables: list[ast.expr] = []
        """The same for other loops, in which a function may train."""
        self.has_trainer = False
        self._in_loop = False
        self._is_conditional = False
        """Whether the code does not run in every iteration of the loop on any rank."""
        self._tensors: set[str] = set()
        """Variables with tensors that the model computes."""
        self._host_values: set[str] = set()
        """Variables with values in host memory."""

    def place(self, line: int) -> SourceLine:
        """Return the place of a line."""
        return self.name, line, self.lines[line - 1].strip()

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Visit a loop. A training loop is the innermost with a backward and a step."""
        if not _is_training_loop(node) or any(
            _is_training_loop(inner) for inner in ast.walk(node) if inner is not node
        ):
            if not isinstance(node, ast.While):
                self.other_iterables.append(node.iter)
            self.generic_visit(node)
            return
        self.train_line = self.train_line or node.lineno
        if not isinstance(node, ast.While):
            self.iterables.append(node.iter)
        before = self._in_loop, self._is_conditional, self._tensors, self._host_values
        self._in_loop, self._is_conditional = True, False
        self._tensors, self._host_values = _loss_names(node), set()
        self.generic_visit(node)
        self._in_loop, self._is_conditional, self._tensors, self._host_values = before

    visit_AsyncFor = visit_While = visit_For  # noqa: N815

    def visit_FunctionDef(self, node: ast.AST) -> None:
        """Visit the body of a function, which does not run where it is defined."""
        before, self._in_loop = self._in_loop, False
        self.generic_visit(node)
        self._in_loop = before

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Visit a condition and its branches."""
        before = self._is_conditional
        self.visit(node.test)
        # Some rank may meet the condition in every iteration.
        inside = list(ast.walk(node.test))
        names = {last_name(inner) for inner in inside} - {""}
        has_modulo = any(isinstance(inner, ast.Mod) for inner in inside)
        is_met = names and names <= _TRUE_ON_A_RANK and not has_modulo
        self._is_conditional = before or not is_met
        for branch in (node.body, node.orelse):
            for child in branch if isinstance(branch, list) else [branch]:
                self.visit(child)
        # Code after `if step % 8: continue` runs only in some iterations.
        skips = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Continue)
        self._is_conditional = before or skips

    visit_IfExp = visit_If  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.match_case) -> None:
        """Visit code that runs after an error, or in one case of several."""
        before, self._is_conditional = self._is_conditional, True
        self.generic_visit(node)
        self._is_conditional = before

    visit_match_case = visit_ExceptHandler

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        """Record which variables hold tensors or values in host memory."""
        self.generic_visit(node)
        if self._is_tensor(node.value):
            self._tensors |= _assigned_names(node)
        elif isinstance(node.value, ast.Call) and _first_name(node.value) in _HOST_MODULES:
            self._host_values |= _assigned_names(node)

    visit_AugAssign = visit_Assign  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        """Record `next(loader)`, `trainer.train()` and calls that wait for the device."""
        name = last_name(node.func)
        if name == "train" and "trainer" in last_name(getattr(node.func, "value", None)).lower():
            self.train_line, self.has_trainer = self.train_line or node.lineno, True
        if self._in_loop and name == "next":
            self.iterables += node.args[:1]
        if self._in_loop and not self._is_conditional:
            self._record_wait(node, name)
        self.generic_visit(node)

    def _record_wait(self, call: ast.Call, name: str) -> None:
        waits = ""
        sure: Confidence = "certain"
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(call.func, ast.Attribute) and not call.args:
            owner = call.func.value
            if name == "item" and _first_name(owner) not in _HOST_MODULES | self._host_values:
                waits = ".item()"
                sure = "certain" if self._is_tensor(owner) else "likely"
            elif name in {"cpu", "numpy", "tolist"} and self._is_tensor(owner):
                waits = f".{name}()"
        is_number = isinstance(call.func, ast.Name) and name in {"float", "int"}
        converts = is_number and any(map(self._is_tensor, arguments))
        shows = name in _OUTPUT_FUNCTIONS and any(map(self._has_tensor, arguments))
        if converts or shows:
            waits = f"{name}() of a tensor"
        if waits:
            self.waits.setdefault(call.lineno, (waits, sure))

    def _has_tensor(self, node: ast.AST) -> bool:
        """Return whether an expression contains a tensor, for example in an f-string."""
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.List)):
            return any(map(self._has_tensor, ast.iter_child_nodes(node)))
        return self._is_tensor(node)

    def _is_tensor(self, node: ast.AST) -> bool:
        """Return whether an expression is a tensor computed by the model."""
        match node:
            case ast.Name(id=name):
                return name in self._tensors
            case ast.Attribute(attr=attr) if attr in _NO_TENSOR:
                return False
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
                return self._is_tensor(inner)
            case ast.BinOp(left=left, right=right):
                return self._is_tensor(left) or self._is_tensor(right)
            case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=args):
                inputs = args if attr in _GATHERS else [inner] if attr in _SAME_TENSOR else []
                return any(map(self._is_tensor, inputs))
            case _:
                return False


def read_training_cell(cells: Sequence[tuple[str, str]]) -> TrainingCellVisitor | None:
    """Read the last cell.

    Args:
        cells: name and source of the cells, oldest first: [("In[3]", "..."), ...]. Earlier cells
            are only searched for the DataLoader.

    Returns:
        None if the last cell is not Python.
    """
    parsed = [(name, source, _parse(source)) for name, source in cells[-_MAX_CELLS:]]
    name, source, tree = parsed[-1] if parsed else ("", "", None)
    if tree is None:
        return None
    cell = TrainingCellVisitor(name, source.split("\n"))
    known = [(name, source, tree) for name, source, tree in parsed if tree is not None]
    try:
        cell.visit(tree)
        find = find_trainer_arguments(known) if cell.has_trainer else None
        iterables = cell.iterables or cell.other_iterables
        cell.loader = find or find_loader(known, iterables, trains=bool(cell.iterables))
    except RecursionError:
        return None  # thousands of nested brackets are not a training loop
    return cell


def _parse(source: str) -> ast.Module | None:
    """Parse a cell with IPython syntax. Line numbers are preserved."""
    first, *others = source.split("\n")
    text = "\n".join(["pass" if first.startswith(_PYTHON_INSIDE) else first, *others])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes ("\d") in the user's strings
            try:
                return ast.parse(text)
            except SyntaxError:
                plain = TransformerManager().transform_cell(text)
                # IPython joins continued lines of a shell command: line numbers would be wrong.
                same_lines = plain.rstrip().count("\n") == text.rstrip().count("\n")
                return ast.parse(plain) if same_lines else None
    except (SyntaxError, ValueError, RuntimeError, MemoryError):
        return None


def _is_training_loop(node: ast.AST) -> bool:
    if not isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
        return False
    return {"backward", "step"} <= {last_name(call.func) for call in calls(node)}


def _loss_names(loop: ast.AST) -> set[str]:
    """Return the names of losses: in `backward(loss)`, `loss.backward()`, and what has them."""
    names: set[str] = set()
    for call in calls(loop):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            loss = call.args[0] if call.args else call.func.value
            names |= {item.id for item in ast.walk(loss) if isinstance(item, ast.Name)}
    # A name assigned before the loop is usually a number, such as `n` in `loss / n`.
    names &= {name for node in ast.walk(loop) for name in _assigned_names(node)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Attribute, ast.Subscript)):
            # `output` holds a tensor if `loss` of `loss = output.loss` is one.
            names |= {_first_name(node.value)} if _assigned_names(node) & names else set()
    return names


def _assigned_names(node: ast.AST) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    names = (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _first_name(node: ast.AST) -> str:
    """Return the first name of a chain, such as `np` of np.mean(x)[0]."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


# ------------------------------------------------------------------------------ the rules


def lint_cell(
    cell: TrainingCellVisitor | None, ranks: Sequence[RankProfile], *, bf16: bool = True
) -> list[LintFinding]:
    """Return remarks on a cell, most expensive first.

    Args:
        cell: the cell, from ``read_training_cell``.
        ranks: measurements of at least one rank that ran it.
        bf16: whether the hardware supports bf16.
    """
    if cell is None:
        return []
    findings = list(_check_waits(cell, ranks))
    if cell.train_line:
        findings += _check_model(cell, ranks, bf16=bf16)
    if cell.loader is not None:
        findings += _check_loader(cell.loader, ranks)
    # A line that waits for the device costs nothing on CPU ranks, so it comes last there.
    return sorted(
        findings, key=lambda item: (item.kind == "sync" and not item.seconds, -item.seconds)
    )


def _check_loader(source: DataLoaderCall, ranks: Sequence[RankProfile]) -> Iterator[LintFinding]:
    """Rules num_workers, pin_memory and sharding."""
    place = (source.cell, source.line, source.text)
    loaders = [loader for rank in ranks for loader in rank.loaders]
    waiting = max(rank.parts.get("data", 0.0) for rank in ranks)
    without_workers = not loaders or any(not loader.num_workers for loader in loaders)
    if without_workers and _share(ranks, waiting) >= _MIN_LOADER_SHARE:
        yield LintFinding(
            "num_workers",
            *place,
            "num_workers=0: the main process loads each batch, and training waits meanwhile."
            f" Waiting for batches takes {_cost(ranks, waiting)}",
            "dataloader_num_workers=4 in TrainingArguments"
            if source.is_trainer
            else "num_workers=4, persistent_workers=True",
            "certain",
            waiting,
        )
    if source.is_trainer:
        return  # a Trainer pins memory and shards
    copying = max(rank.parts.get("copies", 0.0) for rank in ranks)
    on_gpus = all(rank.kind == "cuda" for rank in ranks)
    is_pinned = bool(loaders) and all(loader.pin_memory for loader in loaders)
    if on_gpus and not is_pinned and _share(ranks, copying) >= _MIN_LOADER_SHARE:
        yield LintFinding(
            "pin_memory",
            *place,
            "without pin_memory, copies to the GPU cannot overlap with computation."
            f" Copying batches takes {_cost(ranks, copying)}",
            "pin_memory=True",
            "likely",
            copying,
        )
    is_sharded = all(loader.sharded for loader in loaders) or source.may_be_sharded
    if len(ranks) > 1 and not is_sharded:
        name = source.holder
        yield LintFinding(
            "sharding",
            *place,
            f"{name or 'the DataLoader of the loop'} is not prepared: it is not sharded, so every"
            " rank trains on the same samples",
            f"{name} = accelerator.prepare({name})"
            if name
            else "accelerator.prepare(DataLoader(...))",
            "certain",
        )


def _check_model(
    cell: TrainingCellVisitor, ranks: Sequence[RankProfile], *, bf16: bool
) -> Iterator[LintFinding]:
    """Rules fp16 and train_mode."""
    models = [rank.model for rank in ranks if rank.model is not None]
    if bf16 and any(model.precision == "fp16" for model in models):
        # Another cell may have started the session with fp16.
        named = [number for number, line in enumerate(cell.lines, 1) if "fp16" in line]
        yield LintFinding(
            "fp16",
            *cell.place(named[0] if named else cell.train_line),
            "fp16 overflows above 65504 and needs loss scaling, which skips steps; bf16 has the"
            " range of fp32 at the same speed",
            "--precision bf16 in the %%distribute line",
            "certain",
        )
    # A cell has called model.eval(), or transformers' from_pretrained, which returns a model in
    # evaluation mode.
    if models and not any(model.training for model in models):
        yield LintFinding(
            "train_mode",
            *cell.place(cell.train_line),
            "the model trains in evaluation mode: dropout is disabled and batch norm does not"
            " update its running statistics",
            "model.train() before the loop",
            "certain",
        )


def _check_waits(cell: TrainingCellVisitor, ranks: Sequence[RankProfile]) -> Iterator[LintFinding]:
    """Rule sync."""
    on_cpu = all(rank.kind == "cpu" for rank in ranks)
    idle = max(rank.parts.get("idle", 0.0) + rank.parts.get("python", 0.0) for rank in ranks)
    lines = [line for rank in ranks for line in rank.lines if line.cell == cell.name]
    for number, (call, sure) in sorted(cell.waits.items()):
        seconds = max((line.seconds for line in lines if line.line == number), default=0.0)
        if on_cpu:
            seconds = seconds if _share(ranks, seconds) >= _MIN_STEP_SHARE else 0.0
            takes = f"takes {_cost(ranks, seconds)}" if seconds else "costs nothing on CPU ranks"
            measured = f"Here the line {takes}"
        elif _share(ranks, idle) >= _MIN_STEP_SHARE:
            # The cost of a wait is the time without kernel launches after it.
            seconds = min(idle, seconds) if seconds else idle
            measured = f"The device is idle for {_cost(ranks, idle)}"
        else:
            continue
        yield LintFinding(
            "sync",
            *cell.place(number),
            f"{call} in every step: on a GPU it blocks until all queued kernels have finished, and"
            f" no new ones are launched meanwhile. {measured}",
            "report(loss=loss), which does not synchronize; or keep loss.detach() and read it after"
            " the loop or every 50 steps",
            sure,
            seconds,
        )


def _share(ranks: Sequence[RankProfile], seconds: float) -> float:
    step = max(rank.step_s for rank in ranks)
    return seconds / step if step > 0 else 0.0


def _cost(ranks: Sequence[RankProfile], seconds: float) -> str:
    return f"{_share(ranks, seconds):.0%} of the step ({seconds * 1e3:.0f} ms)"
