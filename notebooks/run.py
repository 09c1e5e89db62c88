"""Execute a notebook and print its cells and outputs to the terminal.

    python notebooks/run.py notebooks/01_first_cell.ipynb

The notebook file is not changed. The exit status is 1 if a cell fails unexpectedly.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

if TYPE_CHECKING:
    from nbformat import NotebookNode

CELL_TIMEOUT_S = 900
"""Timeout of a cell, far more than any cell of these notebooks needs on a slow machine."""

BOLD, DIM, PLAIN = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")


class TerminalClient(NotebookClient):
    """Notebook client that prints outputs as they arrive."""

    def process_message(
        self, msg: dict[str, Any], cell: NotebookNode, cell_index: int
    ) -> NotebookNode | None:
        """Print one message, and store its output as the base class does."""
        print(as_text(msg["msg_type"], msg["content"]), end="", flush=True)
        return super().process_message(msg, cell, cell_index)


def as_text(msg_type: str, content: dict[str, Any]) -> str:
    """Return the text of one message for a terminal; images are replaced by a note."""
    match msg_type:
        case "stream":
            return str(content["text"])
        case "error":
            return "\n".join(content["traceback"]) + "\n"
        case "display_data" | "execute_result" | "update_display_data":
            return of_bundle(content["data"]) + "\n"
        case _:
            return ""


def of_bundle(bundle: dict[str, Any]) -> str:
    """Return the most readable text form of a rich output."""
    if any(mime.startswith("image/") for mime in bundle):
        return f"{DIM}[image: open the notebook to see it]{PLAIN}"
    return str(bundle.get("text/markdown") or bundle.get("text/plain", ""))


def show_cell(cell: NotebookNode, cell_index: int) -> None:  # noqa: ARG001 - nbclient's signature
    """Print a cell's source before it runs: Markdown as is, code indented."""
    if cell.cell_type == "markdown":
        print(f"\n{cell.source}\n")
        return
    print(f"{DIM}" + "\n".join(f"    {line}" for line in cell.source.splitlines()) + PLAIN)


def run(path: Path) -> bool:
    """Execute the notebook at `path`. Return True if all cells succeeded."""
    notebook = nbformat.read(path, as_version=4)
    client = TerminalClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=show_cell,
    )
    try:
        # ipykernel 7.4 warns on stderr that a kernel on the loopback interface is not encrypted
        client.execute(stderr=subprocess.DEVNULL)
    except CellExecutionError:
        return False  # the traceback has already been printed
    return True


def main() -> int:
    """Parse the command line and run one notebook."""
    parser = argparse.ArgumentParser(description="Execute a notebook and print its output.")
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    begin = time.monotonic()
    print(f"{BOLD}==> {path}{PLAIN}")
    ended_well = run(path)
    word = "completed" if ended_well else "stopped at a failed cell"
    print(f"\n{BOLD}==> {path.name}: {word}, {time.monotonic() - begin:.0f} s{PLAIN}")
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
