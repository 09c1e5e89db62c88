"""Runs a function after the import of a module, or now if it is imported already."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` after the module `name` is imported, or now if it is imported already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _PostImportHook(name, action))


class _PostImportHook(importlib.abc.MetaPathFinder):
    """Import hook that calls a function after the execution of one module."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find the module with the other finders, and call the function after its execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._action()

        loader.exec_module = exec_module
        return spec
