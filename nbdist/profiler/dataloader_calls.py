"""The DataLoader calls that a training loop takes its batches from; pure, nothing is run.

The loop's iterable is followed back through names, wrappers and `prepare` to the call that made
it, so that another loader of the notebook is never meant.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.profiler.symbolic_walk import Function, last_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.profiler.symbolic_walk import Event
    from nbdist.profiler.training_loops import StepLoop

HARMLESS = frozenset(
    {"cycle", "enumerate", "iter", "islice", "len", "next", "print", "tqdm", "trange", "zip"}
)
"""What may take a loader and leave it as it is."""
_NO_LOADER = frozenset({"range", "trange"})
_PLACES = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
"""Arguments of a DataLoader behind its dataset, that may be given by their place."""
_NO_LOADERS_OF = frozenset({"np", "numpy", "random", "torch"})
"""Modules whose functions give none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From a loop to the call that made its loader."""

    names: tuple[str, ...] = ()
    """Variables that have held it, the loop's own first."""
    through: tuple[str, ...] = ()
    """Functions that it went through."""
    holder: str = ""
    """The variable outside of functions that has it, no wrapper such as `iter()` in between."""
    prepare: str = ""
    """What prepared it for that variable, as it is called there: "accelerator.prepare"."""


@dataclass(frozen=True, eq=False)
class Source:
    """A call of DataLoader that a loop takes batches from."""

    event: Event
    call: ast.Call
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderText:
    """Such a call in the text of a cell."""

    cell: str
    """"In[2]"."""
    line: int
    call: str
    """"DataLoader(rows, batch_size=8)"."""
    holder: str = ""
    """The variable to assign it to; "" where it stands in a function or no variable has it, so
    that the call runs nowhere else."""
    prepare: str = ""

    def changed(self, keywords: Mapping[str, bool | int]) -> str:
        """Return the line that makes the loader with other arguments, or else an instruction."""
        call = ast.parse(self.call, mode="eval").body
        if not self.holder or not isinstance(call, ast.Call):
            return f"# {self.cell}, line {self.line}: {_instruction(keywords)}"
        by_place = zip(_PLACES, call.args[1:], strict=False)
        given: dict[str | None, ast.expr] = dict(by_place)
        given |= {one.arg: one.value for one in call.keywords}
        given |= {name: ast.Constant(value) for name, value in keywords.items()}
        call.args = call.args[:1]
        call.keywords = [ast.keyword(arg=name, value=value) for name, value in given.items()]
        made = ast.unparse(call)
        return f"{self.holder} = {f'{self.prepare}({made})' if self.prepare else made}"


def made_anew(text: LoaderText | None, **keywords: bool | int) -> str:
    """Return the line that makes the loader with other arguments; else what to write there."""
    return text.changed(keywords) if text else f"# {_instruction(keywords)}"


def _instruction(keywords: Mapping[str, bool | int]) -> str:
    words = ", ".join(f"{name}={value}" for name, value in keywords.items())
    return f"DataLoader(..., {words})"


class Followed:
    """Where the batches of a loop come from."""

    def __init__(self, loop: StepLoop, before: Sequence[Event]) -> None:
        """Follow the loop's iterable, and what it calls next() on."""
        self.sources: list[Source] = []
        self._lost = False
        """It came to what names do not show."""
        self._seen: set[tuple[str, int]] = set()
        """Names with the assignment that they were followed to."""
        aliases = {
            one.node.asname or one.node.name: one.node.name
            for one in before
            if isinstance(one.node, ast.alias)
        }
        self._calls = {
            id(one.node): one
            for one in before
            if isinstance(one.node, ast.Call)
            and aliases.get(one.name(one.node.func), one.name(one.node.func)) == "DataLoader"
        }
        self._assigned = [
            (at, one)
            for at, one in enumerate(before)
            if isinstance(one.node, (ast.Assign, ast.AnnAssign)) and one.node.value is not None
        ]
        frame, until = loop.frame, before.index(loop.events[0])
        if not isinstance(frame.node, ast.While):
            self._follow(frame.node.iter, frame.names, until, Way())
        for event, call in loop.calls():
            if event.name(call.func) == "next":
                for one in call.args[:1]:
                    self._follow(one, event.names, before.index(event), Way(through=("next",)))

    @property
    def likely(self) -> list[Source]:
        """The same; where names do not show it, the one call that there is."""
        if self.sources or not self._lost or len(self._calls) != 1:
            return self.sources
        (event,) = self._calls.values()
        assert isinstance(event.node, ast.Call)  # noqa: S101 - it was chosen so
        return [Source(event, event.node, Way())]

    def _follow(self, node: ast.AST, names: Mapping[str, str], until: int, way: Way) -> None:
        """Go on with an expression, as it was before the event of that index."""
        if isinstance(node, ast.Starred):
            node = node.value
        if isinstance(node, ast.Call):
            self._through(node, names, until, way)
        elif name := last_name(node, names):
            self._named(name, until, way)

    def _through(self, call: ast.Call, names: Mapping[str, str], until: int, way: Way) -> None:
        if event := self._calls.get(id(call)):
            if all(one.call is not call for one in self.sources):
                self.sources.append(Source(event, call, way))
            return
        name = last_name(call.func, names)
        if name in _NO_LOADER:
            return
        prepares = name.startswith("prepare") and way.holder
        on = replace(
            way,
            through=(*way.through, name),
            prepare=ast.unparse(call.func) if prepares else way.prepare,
        )
        found = len(self.sources)
        for one in (*call.args, *(key.value for key in call.keywords)):
            self._follow(one, names, until, on)
        if len(self.sources) == found and _root(call) not in _NO_LOADERS_OF:
            self._lost = True

    def _named(self, name: str, until: int, way: Way) -> None:
        """Go on with what a variable was last assigned."""
        for at, event in reversed(self._assigned):
            if at >= until:
                continue
            for target, value in _pairs(event.node):
                if event.name(target) == name:
                    if (name, at) in self._seen:
                        return
                    self._seen.add((name, at))
                    wraps = isinstance(value, ast.Call) and event.name(value.func) in HARMLESS
                    holds = isinstance(target, ast.Name) and not wraps
                    on = replace(way, names=(*way.names, name))
                    if holds and not way.holder and not _inside_function(event.cell.tree, target):
                        on = replace(on, holder=name)
                    self._follow_assigned(value, event, at, on)
                    return
        self._lost = True

    def _follow_assigned(self, value: ast.expr, event: Event, at: int, way: Way) -> None:
        """One of several things that `prepare` was given goes through it too."""
        whole = event.node.value  # type: ignore[attr-defined]
        if value is not whole and isinstance(whole, ast.Call):
            call = ast.Call(func=whole.func, args=[value], keywords=[])
            self._through(call, event.names, at, way)
        else:
            self._follow(value, event.names, at, way)


def text_of(source: Source) -> LoaderText | None:
    """Its text; None where arguments come as **options or *options: anything may be in them."""
    call, event, way = source.call, source.event, source.way
    if any(one.arg is None for one in call.keywords) or len(call.args) > 1 + len(_PLACES):
        return None
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    runs = not _inside_function(event.cell.tree, call)
    return LoaderText(
        cell=event.cell.name,
        line=call.lineno,
        call=ast.unparse(call),
        holder=way.holder if runs else "",
        prepare=way.prepare,
    )


def _pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment with what each is given, as far as the text tells."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = _each(node.value, len(target.elts))
            pairs += zip(target.elts, values, strict=True)
        else:
            pairs.append((target, node.value))
    return pairs


def _each(value: ast.expr, count: int) -> Sequence[ast.expr]:
    """What each of several targets is given: prepare() gives back what it got, in that order."""
    given: Sequence[ast.expr] = ()
    if isinstance(value, (ast.Tuple, ast.List)):
        given = value.elts
    elif isinstance(value, ast.Call) and last_name(value.func, {}).startswith("prepare"):
        given = value.args
    plain = len(given) == count and not any(isinstance(one, ast.Starred) for one in given)
    return given if plain else [value] * count


def _root(call: ast.Call) -> str:
    """The first name of what is called: "torch" of torch.randn()."""
    node: ast.AST = call.func
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _inside_function(tree: ast.Module, node: ast.AST) -> bool:
    return any(
        inner is node
        for one in ast.walk(tree)
        if isinstance(one, (Function, ast.Lambda, ast.ClassDef))
        for inner in ast.walk(one)
    )
