"""Execute a notebook from start to finish and show it in the terminal as it goes.

    python notebooks/run.py notebooks/01_first_cell.ipynb

The notebook file is left as it is. The exit status is 1 when a cell fails that is not meant to.
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
"""Far more than a cell of these notebooks takes on a slow machine."""

BOLD, DIM, PLAIN = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")


class TerminalClient(NotebookClient):
    """A notebook client that prints outputs at the moment they arrive."""

    def process_message(
        self, msg: dict[str, Any], cell: NotebookNode, cell_index: int
    ) -> NotebookNode | None:
        """Print one message, and keep its output as the base class does."""
        print(as_text(msg["msg_type"], msg["content"]), end="", flush=True)
        return super().process_message(msg, cell, cell_index)


def as_text(msg_type: str, content: dict[str, Any]) -> str:
    """Text of one message for a terminal; a picture is named, not drawn."""
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
    """The most readable form of a rich output."""
    if any(mime.startswith("image/") for mime in bundle):
        return f"{DIM}[a picture: open the notebook to see it]{PLAIN}"
    return str(bundle.get("text/markdown") or bundle.get("text/plain", ""))


def show_cell(cell: NotebookNode, cell_index: int) -> None:  # noqa: ARG001 - nbclient's signature
    """Print a cell's source before it runs: prose plainly, code indented."""
    if cell.cell_type == "markdown":
        print(f"\n{cell.source}\n")
        return
    print(f"{DIM}" + "\n".join(f"    {line}" for line in cell.source.splitlines()) + PLAIN)


def run(path: Path) -> bool:
    """Execute the notebook at `path`; True when it came to its end."""
    notebook = nbformat.read(path, as_version=4)
    client = TerminalClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=show_cell,
    )
    try:
        # ipykernel 7.4 warns there that a kernel on the loopback interface is not encrypted
        client.execute(stderr=subprocess.DEVNULL)
    except CellExecutionError:
        return False  # its traceback has been printed as it arrived
    return True


def main() -> int:
    """Parse the command line and run one notebook."""
    parser = argparse.ArgumentParser(description="execute a notebook and show its output here")
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    begin = time.monotonic()
    print(f"{BOLD}==> {path}{PLAIN}")
    ended_well = run(path)
    word = "from start to finish" if ended_well else "stopped at a failed cell"
    print(f"\n{BOLD}==> {path.name}: {word}, {time.monotonic() - begin:.0f} s{PLAIN}")
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
