"""`%nbdist script`: writes what a session ran as a folder that any launcher can run."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist import strategies
from nbdist._version import __version__
from nbdist.display import show_as_text
from nbdist.errors import OptionError
from nbdist.paths import expand_user
from nbdist.session import cell_history
from nbdist.session.script_source import build_script

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from nbdist.session.cell_history import CellHistory, CellRun
    from nbdist.session.lifecycle import SessionLifecycle
    from nbdist.session.script_source import Script

RUNTIME_SOURCE = Path(__file__).parents[1] / "worker" / "script_runtime.py"
"""Copied to runtime.py; it does not import nbdist."""
_DEEPSPEED_FILE = "ds_config.json"
_LAUNCH = "accelerate launch --config_file accelerate.yaml train.py"
_WITH_NBDIST = '''"""Runs train.py as nbdist ran the cells. Written by nbdist."""

from nbdist.worker.script_session import display, send, start  # noqa: F401 - for train.py

accelerator, report, save, load, export = start({options})
'''
_RESUMES = "resumes a Trainer: from a checkpoint of %nbdist save only"
_CLIPS = "clips gradients, which DeepSpeed does with gradient_clipping in ds_config.json, or"
_SBATCH = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={cpus}
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \\
    --nnodes="$SLURM_NNODES" --nproc-per-node={each} --rdzv-backend=c10d \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head_node:29500" train.py
"""
"""srun does not take --cpus-per-task from the lines above since Slurm 22.05."""


@dataclass(frozen=True, slots=True)
class WrittenScript:
    """Result of `Session.script`: the folder, its files, and how to run it."""

    folder: Path
    files: tuple[str, ...]
    cells: tuple[int, ...]
    """Numbers of the cells in train.py."""
    commands: dict[str, str]
    """Launcher -> command to run in the folder."""
    notes: tuple[str, ...]
    """What is not in the script, and what it needs."""

    def __str__(self) -> str:
        width = max(map(len, self.commands))
        cells = f"cell{'s' * (len(self.cells) > 1)} {', '.join(map(str, self.cells))}"
        return "\n".join(
            [
                f"nbdist: wrote {self.folder}/ from {cells}: {', '.join(self.files)}",
                *(f"nbdist: {note}" for note in self.notes),
                f"  {'in':<{width}}  cd {shlex.quote(str(self.folder))}",
                *(f"  {name:<{width}}  {line}" for name, line in self.commands.items()),
            ]
        )

    _repr_pretty_ = show_as_text


def write_script(
    session: SessionLifecycle,
    folder: str | os.PathLike[str],
    *,
    cells: str | int | Sequence[int] | None,
    tag: str | None,
    overwrite: bool,
    with_nbdist: bool,
) -> WrittenScript:
    """Write the folder of `Session.script`; nothing is written if anything is not allowed."""
    target = expand_user(folder)
    if target.exists() and not target.is_dir():
        raise OptionError(f"{target} is a file. Name a folder.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise OptionError(
            f"The folder {target} is not empty. Use another, or add --overwrite (overwrite=True)."
        )
    if session.undecided:
        raise OptionError(
            "auto has not chosen a backend yet: it does at accelerator.prepare(). Run that cell"
            " first."
        )
    runs, left_out = choose_cells(session.history, cells, tag)
    uses_nbdist = [run.number for run, _ in runs if _imports_nbdist(run)]
    notes = []
    if uses_nbdist and not with_nbdist:
        numbers = ", ".join(map(str, uses_nbdist))
        notes.append(f"cell {numbers} uses nbdist, so the script needs it: see requirements.txt")
    with_nbdist = with_nbdist or bool(uses_nbdist)
    needs_nbdist = {"resume_from_checkpoint": _RESUMES}
    if session.options.strategy.engine == "deepspeed":
        needs_nbdist["clip_grad_norm_"] = _CLIPS
    for word, note in needs_nbdist.items():
        numbers = ", ".join(str(run.number) for run, _ in runs if _has_word(run, word))
        if numbers and not with_nbdist:
            notes.append(f"cell {numbers} {note} with --with-nbdist (with_nbdist=True)")
    script = build_script(
        runs,
        docstring=(
            f"Written by nbdist {__version__} from a notebook: {session.options.describe()}.\n\n"
            f"Run it in this folder: {_LAUNCH}\n"
        ),
        arguments={} if with_nbdist else _accelerator_arguments(session.options),
        setup="" if with_nbdist else _setup(session.options),
        left_out=left_out,
        runtime_has_accelerator=with_nbdist,
    )
    notes += [f"not in the script: {text}" for text in script.left_out]
    notes += [f"set in train.py: {text}" for text in script.to_provide]
    notes += [f"copy {path} into the folder: train.py imports it" for path in own_modules(script)]
    commands = _commands(session)
    saves_model = any(_has_word(run, "save_model") for run, _ in runs)
    files = _config_files(session, with_nbdist=with_nbdist, saves_model=saves_model) | {
        "train.py": script.source,
        "requirements.txt": _requirements(script, session, with_nbdist=with_nbdist),
        "submit.sbatch": _sbatch(session, target.resolve().name),
        "README.md": _readme(session, commands, notes),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"Cannot write the script to {target}: {error.strerror}.") from error
    written = tuple(run.number for run, _ in runs)
    return WrittenScript(target, tuple(sorted(files)), written, commands, tuple(notes))


# -- the cells


def choose_cells(
    history: CellHistory, cells: str | int | Sequence[int] | None = None, tag: str | None = None
) -> tuple[list[tuple[CellRun, list[str]]], list[str]]:
    """Return the cells of a script with notes for the reader, and what is left out.

    Raises:
        OptionError: a cell that did not run, or whose text is not kept; no cell at all.
    """
    if cells is not None:
        return [(run, []) for run in _numbered(history, cells)], []
    if history.num_dropped:
        raise OptionError(
            f"The code of the first {history.num_dropped} cells of this session is no longer kept."
            " Select the cells of the script with --cells."
        )
    by_id: dict[str, list[CellRun]] = {}
    left_out: list[str] = []
    for run in history.runs:
        if tag is None or tag in run.tags:
            by_id.setdefault(run.cell_id, []).append(run)
    placed: list[tuple[int, CellRun, list[str]]] = []
    for cell_id, runs in by_id.items():
        good = [run for run in runs if not run.error]
        if cell_id in cell_history.deleted_cells:
            left_out.append(f"cell {runs[-1].number}, which was deleted from the notebook")
        elif not good:
            left_out.append(f"cell {runs[-1].number}, which failed with {runs[-1].error}")
        else:
            placed.append((history.runs.index(good[0]), good[-1], _notes(runs, good)))
    if not placed:
        named = f" with the tag {tag!r}" if tag else ""
        raise OptionError(
            f"No %%distribute cell{named} ran since the ranks were started, so there is nothing to"
            " write. Run the cells of the script first."
        )
    return [(run, notes) for _, run, notes in sorted(placed, key=lambda item: item[0])], left_out


def _notes(runs: Sequence[CellRun], good: Sequence[CellRun]) -> list[str]:
    """Return comments on a cell that ran several times."""
    notes = []
    if len(good) > 1:
        notes.append(f"Ran {len(good)} times in the notebook; this is its latest code.")
    if runs[-1].error:
        notes.append(f"Its last run failed with {runs[-1].error}; this code ran before.")
    return notes


def _numbered(history: CellHistory, cells: str | int | Sequence[int]) -> list[CellRun]:
    """Return the runs with these numbers, such as "3,5-7"; a range may have gaps."""
    by_number = {run.number: run for run in history.runs}
    chosen: list[int] = []
    for part in str(cells).split(",") if isinstance(cells, str | int) else map(str, cells):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise OptionError(f"--cells takes numbers of cells such as 3,5-7, got {cells!r}.")
        found = [number for number in sorted(by_number) if int(first) <= number <= int(last)]
        if not found:
            known = ", ".join(map(str, by_number)) or "none"
            raise OptionError(
                f"The code of cell {part.strip()} is not available: it did not run on these ranks."
                f" Use --cells with some of {known}."
            )
        chosen += found
    return [by_number[number] for number in dict.fromkeys(chosen)]


def _imports_nbdist(run: CellRun) -> bool:
    words = (line.split() for part in run.code for line in part.code.splitlines())
    imports = [w[1] for w in words if len(w) > 1 and w[0] in {"import", "from"}]
    return any(name.split(".")[0] == "nbdist" for name in imports)


def _has_word(run: CellRun, word: str) -> bool:
    return any(word in part.code for part in run.code)


# -- the files


def _accelerator_arguments(options: strategies.Options) -> dict[str, list[str]]:
    """Return arguments of Accelerator() without a key in its config file, and their imports."""
    arguments: dict[str, list[str]] = {}
    if options.accumulate > 1:
        arguments[f"gradient_accumulation_steps={options.accumulate}"] = []
    dtypes = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}
    if options.strategy.engine == "fsdp" and (dtype := dtypes.get(options.precision or "")):
        # Accelerate's own policy also casts the loss and the reduced gradients.
        plugin = "FullyShardedDataParallelPlugin"
        policy = "MixedPrecision" if options.strategy.level == 1 else "MixedPrecisionPolicy"
        arguments[
            f"fsdp_plugin={plugin}(\n"
            f"    mixed_precision_policy={policy}(\n"
            f"        param_dtype=torch.{dtype}, reduce_dtype=torch.float32\n"
            "    )\n"
            ")"
        ] = [
            "import torch",
            f"from accelerate import {plugin}",
            f"from torch.distributed.fsdp import {policy}",
        ]
    return arguments


def _setup(options: strategies.Options) -> str:
    """Return the call that applies the options which only runtime.py knows."""
    arguments = []
    if options.clip is not None and options.strategy.engine != "deepspeed":
        arguments.append(f"clip={options.clip}")
    if options.activation_checkpointing and options.strategy.engine != "fsdp":
        arguments.append("activation_checkpointing=True")
    return f"setup({', '.join(arguments)})" if arguments else ""


def _config_files(
    session: SessionLifecycle, *, with_nbdist: bool, saves_model: bool
) -> dict[str, str]:
    import yaml  # only here: most sessions write no config file

    options, hardware = session.options, session.hardware
    if options.strategy.engine == "fsdp" and saves_model:
        # transformers 5.23: save_model() of a Trainer writes nothing with SHARDED_STATE_DICT.
        config = {"state_dict_type": "FULL_STATE_DICT"} | dict(options.fsdp_config or {})
        options = replace(options, fsdp_config=config)
    devices = session.placement.devices
    accelerate = strategies.write_accelerate_config(
        options,
        hardware,
        devices=devices if devices != tuple(range(len(devices or ()))) else None,
        deepspeed_file=_DEEPSPEED_FILE,
    )
    files = {"accelerate.yaml": yaml.safe_dump(accelerate, sort_keys=False)}
    if options.strategy.engine == "deepspeed":
        config = strategies.write_deepspeed_config(options, hardware)
        files[_DEEPSPEED_FILE] = json.dumps(config, indent=2) + "\n"
    runtime = RUNTIME_SOURCE.read_text(encoding="utf-8")
    if with_nbdist:
        defaults = strategies.Options().to_json() | {"backend": None, "precision": None}
        given = {k: v for k, v in options.to_json().items() if v != defaults[k]}
        runtime = _WITH_NBDIST.format(options=json.loads(json.dumps(given)))
    return files | {"runtime.py": runtime}


def _requirements(script: Script, session: SessionLifecycle, *, with_nbdist: bool) -> str:
    distributions = importlib.metadata.packages_distributions()
    modules = (script.modules & distributions.keys()) | {"torch", "accelerate"}
    modules |= {"deepspeed"} if session.options.strategy.engine == "deepspeed" else set()
    modules |= {"nbdist"} if with_nbdist else set()
    names = sorted({distributions[name][0] for name in modules if name in distributions})
    # Without "+cpu", which only torch's own index has.
    versions = [importlib.metadata.version(name).partition("+")[0] for name in names]
    return "".join(f"{name}=={version}\n" for name, version in zip(names, versions, strict=True))


def own_modules(script: Script) -> list[str]:
    """Return the modules in the notebook's folder that a script imports."""
    files = [f"{name}.py" for name in sorted(script.modules) if Path(f"{name}.py").is_file()]
    return files + [f"{n}/" for n in sorted(script.modules) if Path(n, "__init__.py").is_file()]


def _commands(session: SessionLifecycle) -> dict[str, str]:
    nproc = session.world_size
    gpus = f" --entrypoint-num-gpus {nproc}" if session.hardware.kind == "cuda" else ""
    return {
        "accelerate": _LAUNCH,
        "torchrun": f"torchrun --nproc-per-node {nproc // session.hardware.nodes} train.py",
        "ray": f"ray job submit --working-dir .{gpus} -- {_LAUNCH}",
        "slurm": "sbatch submit.sbatch",
    }


def _sbatch(session: SessionLifecycle, name: str) -> str:
    nodes = session.hardware.nodes
    each = session.world_size // nodes
    is_cuda = session.hardware.kind == "cuda"
    return _SBATCH.format(
        name=shlex.quote(name),
        nodes=nodes,
        each='"$SLURM_GPUS_ON_NODE"' if is_cuda else each,
        cpus=each * 4 if is_cuda else each,
        gpus=f"#SBATCH --gpus-per-node={each}\n" if is_cuda else "",
    )


def _readme(session: SessionLifecycle, commands: dict[str, str], notes: Sequence[str]) -> str:
    lines = "\n".join(commands.values())
    listed = "".join(f"- {note}\n" for note in notes)
    return (
        f"# {session.options.describe()} on {session.place}\n\n"
        "`pip install -r requirements.txt`, then one of these in this folder:\n\n"
        f"```sh\n{lines}\n```\n\n"
        "`report()` writes to `metrics/`, `save()` to `checkpoints/`. `accelerate.yaml` has the"
        " engine and the number of processes; `%%distribute --config accelerate.yaml` starts a"
        " session with it in a notebook. Relative paths in `train.py` start in this folder, not in"
        " that of the notebook.\n"
        + (f"\n## What differs from the notebook\n\n{listed}" if listed else "")
    )
