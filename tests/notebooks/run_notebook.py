"""Executes a shipped notebook, and reads what its cells show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]


def executed(name: str, *, folder: Path | None = None, within: Sequence[str] = ()) -> NotebookNode:
    """Run one notebook in a kernel of its own; a failing cell raises.

    Args:
        name: of the file.
        folder: where its kernel works. Default: where the notebook lies.
        within: a command that runs the kernel, as `ip netns exec NAME`. Needs a folder.
    """
    path = ROOT / "notebooks" / name
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_manager_class=(
            _inside(folder, within) if folder is not None and within else AsyncKernelManager
        ),
        timeout=600,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder or path.parent)}},
    )
    client.execute()
    return notebook


def _inside(folder: Path, within: Sequence[str]) -> type[AsyncKernelManager]:
    """Starts kernels there; sockets that are files are seen from here, too."""

    class Inside(AsyncKernelManager):
        def __init__(self, **given: Any) -> None:
            super().__init__(transport="ipc", ip=str(folder / "k"), **given)

        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            return [*within, *super().format_kernel_cmd(extra_arguments)]

    return Inside


def cell(notebook: NotebookNode, cell_id: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == cell_id)


def text(notebook: NotebookNode, cell_id: str) -> str:
    parts = []
    for output in cell(notebook, cell_id).outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.extend(output.traceback)
        else:
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(parts)


def mimes(notebook: NotebookNode, cell_id: str) -> set[str]:
    """Types of all rich outputs of a cell."""
    return {mime for output in cell(notebook, cell_id).outputs for mime in output.get("data", {})}
