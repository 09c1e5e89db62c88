"""Layout of DDP and of models without an engine: every rank has the whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.state.layouts.base import Layout, ParameterPlacement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class DdpLayout(Layout):
    """Layout of DDP: parameters and state are whole; each rank owns an even part of each."""

    @classmethod
    def is_layout_of(cls, model: nn.Module) -> bool:  # noqa: ARG003 - accepts any model
        """Return True: the layout fits any model that no other engine has wrapped."""
        return True

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the parameters of the module as whole placements."""
        for name, parameter in self.named_parameters():
            yield self.whole_placement(name, parameter)

    def required_attributes(self) -> Iterator[tuple[object, str]]:
        """Yield nothing: only public attributes of torch are used."""
        yield from ()
