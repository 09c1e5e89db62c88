"""`@nbdist.distribute`: a function whose body runs on the ranks, for scripts and other notebooks.

The function travels with cloudpickle, from the kernel to the ranks only. What it returns comes
back as a payload file, which contains no code.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import platform
import sys
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from nbdist.errors import OptionError, PayloadError
from nbdist.output.sink import running_cell
from nbdist.output.tracebacks import CALL_COMMENT
from nbdist.rank_sets import resolve_ranks
from nbdist.session.session import Session, apply_options, current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RUN = """\
{comment}{name}
from nbdist.worker.distributed_function import call as _call
_result = _call(globals(), "{python}")
del _call"""
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def distribute(
    function: Callable[..., Any] | None = None,
    *,
    ranks: str | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Decorate a function so that a call runs its body on every rank.

    A call starts the session if there is none, applies the options to it, and blocks until all
    ranks have returned. Arguments, closures and the functions and variables of the notebook or
    file that the function uses are copied to the ranks. In the function, the names of a
    `%%distribute` cell are defined too: `accelerator`, `rank`, `report` and the variables of
    earlier cells.

    Example:
        @nbdist.distribute(backend="fsdp", nproc=2)
        def mean(size):
            values = torch.rand(size, device=device)
            return accelerator.reduce(values.mean(), "mean").item()

        means = mean(100)  # a list: the value of each rank

    Args:
        function: the function, if the decorator is used without parentheses.
        ranks: run on these ranks only, "0,2-3" or a sequence. Default: all.
        options: any option of `Session`.

    Raises:
        OptionError: what is decorated is not a function, or a generator or an async function.
        PayloadError: an argument cannot be pickled, or a returned value cannot be moved.
        CellError: the function raised on a rank, or the ranks run another version of Python.
    """
    if function is None:
        return functools.partial(distribute, ranks=ranks, **options)
    if not isinstance(function, FunctionType):
        msg = f"@nbdist.distribute decorates a function defined with def, not {function!r}."
        raise OptionError(msg)
    if function.__code__.co_flags & _NOT_PLAIN:
        msg = f"{function.__name__}() cannot be distributed. Define it without async and yield."
        raise OptionError(msg)
    return DistributedFunction(function, ranks, options)


class DistributedFunction:
    """A function or method that runs on the ranks; on a rank itself, it is called directly."""

    def __init__(
        self,
        function: FunctionType,
        ranks: str | Sequence[int] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._ranks, self._options = function, ranks, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the ranks; return a list of what each of them returned."""
        if "NBDIST_RANK" in os.environ:
            return self._call_on_rank(args, kwargs)
        session = current_session()
        if session is None:
            session = Session(**self._options).start()
        elif changed := apply_options(session, self._options):
            screen = running_cell()
            screen.display({"text/plain": changed}, {})
            screen.flush()
        session.push(_function=self._pickle_call(args, kwargs))
        name = self._function.__name__
        python = platform.python_version()
        session.run(_RUN.format(comment=CALL_COMMENT, name=name, python=python), self._ranks)
        ranks = resolve_ranks(self._ranks, session.world_size)
        try:
            return [session.pull("_result", rank=rank) for rank in ranks]
        except PayloadError as error:
            message = str(error).replace("_result", f"The value of {name}()", 1)
            raise PayloadError(message) from None
        finally:
            session.push(_result=None)  # frees its memory on the ranks

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a method to its instance, which is copied to the ranks as an argument."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function alone: on a rank, the options do not matter."""
        return DistributedFunction, (self._function,)

    def _call_on_rank(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; meanwhile its module has the names of a cell that it lacks."""
        own, shell = self._function.__globals__, get_ipython()
        names = {} if shell is None else shell.user_ns  # none in a process of a DataLoader
        lent = {name: value for name, value in names.items() if name not in own}
        own.update(lent)
        try:
            return self._function(*args, **kwargs)
        finally:
            for name in lent:
                own.pop(name, None)

    def _pickle_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        import cloudpickle  # type: ignore[import-untyped]

        # The ranks may not be able to import the user's script or read the file of its cell.
        module = sys.modules.get(self._function.__module__)
        file = self._function.__code__.co_filename
        call = (self, args, kwargs, file, linecache.getlines(file))
        by_value = module is not None and self._function.__module__ != "__main__"
        try:
            if by_value:
                cloudpickle.register_pickle_by_value(module)
            content: bytes = cloudpickle.dumps(call)
        except Exception as error:  # pickling runs arbitrary methods of the objects
            msg = (
                f"{self._function.__name__}() cannot be copied to the ranks: {error}. Pass values"
                " that can be pickled, and create the others in the function."
            )
            raise PayloadError(msg) from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        return content
