"""The notebooks as pages: executed, with outputs, run time and needed packages.

    python website/gallery.py            # execute what has changed, and print the times

An executed notebook is kept in build/gallery, under a hash of the notebook and of the package's
code, so that only a change of either executes it again.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "gallery"
NOT_EXECUTED = {
    "07_more_machines": "It needs a Ray cluster with two nodes. A test executes it on two hosts of"
    " one machine: `make nodes`.",
}
"""Why a notebook has no outputs here."""
_TIMEOUT_S = 600
INDEX = """\
# Gallery

Notebooks that run on two CPU ranks without a download: small models, generated data. The pages show
them as executed by `make docs`, two at a time on a machine with two cores, so each takes longer
than it would alone. Each page has the notebook to download. What libraries write to stderr, such as
warnings of torch, is left out. With GPUs, remove `-n 2` where a cell has it.

"""
_PAGE_TEMPLATE = """\
{% extends 'markdown/index.md.j2' %}
{% macro block(text) %}
`````output
{{ text | strip_ansi | trim }}
`````
{% endmacro %}
{% block stream %}{{ block(output.text) }}{% endblock stream %}
{% block error %}{{ block(output.traceback | join('\n')) }}{% endblock error %}
{% block data_text %}{{ block(output.data['text/plain']) }}{% endblock data_text %}
{% block data_html %}
<div class="output-html" data-search-exclude>
{{ output.data['text/html'] }}
</div>
{% endblock data_html %}
"""
_HEAD = """\
<a class="md-button" href="{name}.ipynb" download>Download the notebook</a>

{time}. Needs: {needs}.
"""


@dataclass(frozen=True)
class Recipe:
    """One notebook of the gallery."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the file, without its suffix."""
        return self.path.stem

    @cached_property
    def source(self) -> NotebookNode:
        """The notebook as committed, without outputs."""
        return nbformat.read(self.path, as_version=4)

    @property
    def title(self) -> str:
        """The heading of the first cell."""
        return str(self.source.cells[0].source).partition("\n")[0].removeprefix("# ")

    @property
    def summary(self) -> str:
        """The first paragraph, without links, which are relative to the notebook."""
        paragraph = self.source.cells[0].source.split("\n\n")[1]
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))

    @cached_property
    def needs(self) -> list[str]:
        """Packages that its cells import, besides the dependencies of nbdist[ranks]."""
        code = "\n".join(c.source for c in self.source.cells if c.cell_type == "code")
        lines = [line for line in code.splitlines() if not line.startswith("%%")]
        tree = ast.parse(TransformerManager().transform_cell("\n".join(lines)))
        names = {
            name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else _names(node))
        }
        return sorted(names & {"datasets", "matplotlib", "pandas", "peft", "trl"})

    @property
    def executed(self) -> Path:
        """Where the executed notebook is kept."""
        digest = hashlib.sha256(self.path.read_bytes() + package_digest()).hexdigest()
        return CACHE / f"{self.name}-{digest[:16]}.ipynb"

    def run(self) -> NotebookNode:
        """Return the notebook with outputs; execute it if it has changed."""
        if self.name in NOT_EXECUTED:
            return self.source
        if not self.executed.exists():
            for old in CACHE.glob(f"{self.name}-*.ipynb"):
                old.unlink()
            CACHE.mkdir(parents=True, exist_ok=True)
            nbformat.write(execute(self.path), self.executed)
        return nbformat.read(self.executed, as_version=4)

    def describe_time(self, ran: NotebookNode) -> str:
        """Return how long the notebook ran, or why it did not."""
        if self.name in NOT_EXECUTED:
            return f"Not executed here. {NOT_EXECUTED[self.name]}".removesuffix(".")
        return f"Executed in {ran.metadata.seconds:.0f} s on two CPU ranks"

    def short_time(self) -> str:
        """Return the time alone, for the list."""
        return "" if self.name in NOT_EXECUTED else f"{self.run().metadata.seconds:.0f} s"

    def describe_needs(self) -> str:
        """Return the packages to install."""
        code = self.path.read_text()
        extras = "ranks,deepspeed" if re.search(r"\bzero[123]\b", code) else "ranks"
        more = ["ray[client]"] if "--on ray" in code else []
        return ", ".join(f"`{name}`" for name in [f"nbdist[{extras}]", *self.needs, *more])

    def row(self) -> str:
        """Return its row in the list of all recipes."""
        what = f"[{self.title}]({self.name}.md)<br>{self.summary}"
        return f"| {what} | {self.short_time()} | {self.describe_needs()} |\n"

    def page(self) -> tuple[str, dict[str, bytes]]:
        """Return the page as Markdown, and its images by their path beside the page."""
        ran = self.run()
        exporter = MarkdownExporter(
            extra_loaders=[DictLoader({"page.md.j2": _PAGE_TEMPLATE})], template_file="page.md.j2"
        )
        files = {"output_files_dir": f"{self.name}_files", "unique_key": self.name}
        body, resources = exporter.from_notebook_node(with_one_form(ran), files)
        title, _, rest = body.strip().partition("\n")
        head = _HEAD.format(
            name=self.name, time=self.describe_time(ran), needs=self.describe_needs()
        )
        return f"{title}\n\n{head}\n{rest}", resources["outputs"]


def _names(node: ast.Import) -> list[str]:
    return [alias.name for alias in node.names]


def recipes() -> list[Recipe]:
    """Return all notebooks, in the order of their numbers."""
    return [Recipe(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


@cache
def package_digest() -> bytes:
    """Return a digest of the package's code."""
    paths = sorted((ROOT / "nbdist").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).digest()


def execute(path: Path) -> NotebookNode:
    """Run a notebook on two CPU ranks in an empty folder; a failing cell raises."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nbdist-docs-") as folder:
        # what earlier sessions learned about this machine must not change the outputs
        kernel_environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "IPYTHONDIR": f"{folder}/ipython",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "XDG_CACHE_HOME": f"{folder}/cache",
        }
        work = Path(folder, "work")
        work.mkdir()
        client = NotebookClient(
            notebook,
            timeout=_TIMEOUT_S,
            store_widget_state=False,
            resources={"metadata": {"path": str(work)}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
        )
        begin = time.monotonic()
        client.execute(env=kernel_environment)
    notebook.metadata["seconds"] = time.monotonic() - begin
    return notebook


def with_one_form(notebook: NotebookNode) -> NotebookNode:
    """Return a copy without stderr, and with consecutive texts as one output."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        merged: list[NotebookNode] = []
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                continue
            if merged and output.output_type == merged[-1].output_type == "stream":
                merged[-1].text += output.text
            elif output.get("text", "data") or output.get("data"):
                merged.append(output)
        if "outputs" in cell:
            cell.outputs = merged
    return copy


def execute_changed(names: Collection[str] = ()) -> None:
    """Execute the notebooks that have changed, two at a time, and print the times.

    Two at a time is faster, although each has two ranks: processes that start read files and
    wait.
    """

    def report(recipe: Recipe) -> None:
        known = recipe.executed.exists()
        time_taken = recipe.describe_time(recipe.run())
        if not known:
            print(f"{recipe.path.name}: {time_taken}", flush=True)

    with ThreadPoolExecutor(2) as threads:
        chosen = [recipe for recipe in recipes() if not names or recipe.name in names]
        # large files first: their cells take longer, so all threads end at about the same time
        list(threads.map(report, sorted(chosen, key=lambda recipe: -recipe.path.stat().st_size)))


if __name__ == "__main__":
    execute_changed(sys.argv[1:])
