"""DDP, and a model without an engine: every rank has everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.state.layouts.base import Layout, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Ddp(Layout):
    """Parameters and state are whole; each rank owns an even share of each."""

    @classmethod
    def holds(cls, model: nn.Module) -> bool:  # noqa: ARG003 - any model can be read so
        """Return True: a model under no other engine has its own parameters."""
        return True

    def places(self) -> Iterator[Place]:
        """Each parameter is where the module has it."""
        for name, parameter in self.named_parameters():
            yield self.replica(name, parameter)

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return nothing: modules and optimizers are torch's public interface."""
        yield from ()
