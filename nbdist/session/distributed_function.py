"""`@nbdist.distribute`: a function whose body runs on the ranks, for scripts and other notebooks.

The function travels with cloudpickle, from the kernel to the ranks only. What it returns comes
back as a payload file, which contains no code.
"""

from __future__ import annotations

import functools
import linecache
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError, PayloadError
from nbdist.rank_sets import resolve_ranks
from nbdist.session.cell_history import CALL_COMMENT
from nbdist.session.progress import StatusLine
from nbdist.session.session import Session, apply_options, current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RUN = """\
{comment}{name}
from nbdist.worker.distributed_function import call as _call
_result = _call(_function, globals())
del _call, _function"""


def distribute(
    function: Callable[..., Any] | None = None,
    *,
    ranks: str | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Decorate a function so that a call runs its body on every rank.

    A call starts the session if there is none, applies the options to it, and blocks until all
    ranks have returned. Arguments, closures and the functions and variables of the notebook that
    the function uses are copied to the ranks. In the function, the names of a `%%distribute` cell
    are defined too: `accelerator`, `rank`, `report` and the variables of earlier cells.

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
        OptionError: what is decorated is not a function.
        PayloadError: an argument cannot be pickled, or a returned value cannot be moved.
        CellError: the function raised on a rank.
    """
    if function is None:
        return functools.partial(distribute, ranks=ranks, **options)
    if not isinstance(function, FunctionType):
        msg = f"@nbdist.distribute decorates a function defined with def, not {function!r}."
        raise OptionError(msg)
    return DistributedFunction(function, ranks, options)


class DistributedFunction:
    """A function that runs on the ranks; on a rank itself, it is the plain function."""

    def __init__(
        self,
        function: FunctionType,
        ranks: str | Sequence[int] | None,
        options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._ranks, self._options = function, ranks, options

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function on the ranks; return what each of them returned."""
        session = current_session()
        if session is None:
            session = Session(**self._options).start()
        elif changed := apply_options(session, self._options):
            with StatusLine() as line:
                line.show(changed)
        session.push(_function=self._pickle_call(args, kwargs))
        name = self._function.__name__
        session.run(_RUN.format(comment=CALL_COMMENT, name=name), self._ranks)
        ranks = resolve_ranks(self._ranks, session.world_size)
        return [session.pull("_result", rank=rank) for rank in ranks]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain function, so that distributed functions can call each other."""
        return _identity, (self._function,)

    def _pickle_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        import cloudpickle  # type: ignore[import-untyped]

        # The ranks may not be able to import the user's script or read the file of its cell.
        module = sys.modules.get(self._function.__module__)
        file = self._function.__code__.co_filename
        call = (self._function, args, kwargs, file, linecache.getlines(file))
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


def _identity(function: FunctionType) -> FunctionType:
    return function
