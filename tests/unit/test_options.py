"""An option is declared once, and is known everywhere a session is configured.

`python tests/unit/test_options.py` writes docs/options.md again.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from nbdist import strategies
from nbdist.magics import arguments, magics
from nbdist.panel import commands

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
_HEAD = """\
# Options of a session

The first option of each row goes on the line of `%%distribute`; *keyword* is the argument of
`Session(...)`. Only one has another name in Python: `--gpus` is `devices=`. Options without a value
are turned off by their `--no-` form, such as `--no-compile`, except `--auto`.

Options marked *switch* also go on the line of `%nbdist switch NAME`, and are arguments of
`session.switch(...)`: they change a running session without losing the training state.
`session.restart(...)` takes them too, and `auto`: it starts new ranks, and variables are lost.

On a `%%distribute` line, `--auto` and another `--on` or `--python` start new ranks, and variables
are lost. `--partition`, `--time`, `--account` and `--interface` can be set only for a new session
(`%nbdist stop`, then `%%distribute` with these options).

[Backends](strategies.md) lists what each backend supports, [Several machines](clusters.md) explains
the options of clusters. This page is made by `python tests/unit/test_options.py`.

The comment `#| distribute --backend fsdp` as the first line of a cell is the same as
`%%distribute --backend fsdp`. Type checkers, linters and jupytext then read the cell as Python.
"""
_TITLES = {
    "engine": "The training engine",
    "ranks": "The ranks",
    "cluster": "Where the ranks run",
}


def page() -> str:
    parts = [_HEAD]
    for scope, title in _TITLES.items():
        parts.append(
            f"\n## {title}\n\n| option | keyword | switch | meaning |\n|---|---|---|---|\n"
        )
        for name, item in strategies.ARGUMENTS.items():
            if item.scope == scope:
                value = f" {item.metavar}" if item.metavar else ""
                flags = ", ".join(f"`{flag}{value}`" for flag in reversed(item.flags(name)))
                switch = "yes" if item.can_switch else ""
                parts.append(f"| {flags} | `{name}` | {switch} | {item.help} |\n")
    return "".join(parts)


def test_the_reference_page_is_made_of_the_declarations() -> None:
    assert PAGE.read_text() == page()


def test_every_option_goes_on_the_lines_of_the_magics() -> None:
    names = {item.name for item in fields(strategies.SessionOptions)}
    assert names == set(strategies.ARGUMENTS)
    assert names <= set(vars(magics.parse_distribute_line("")))
    switch = vars(arguments.PARSERS["switch"].parse_args([]))
    assert names & switch.keys() == {n for n in names if strategies.ARGUMENTS[n].can_switch}
    flags = {flag for n, item in strategies.ARGUMENTS.items() for flag in item.flags(n)}
    assert arguments.OPTION_VALUES.keys() - {"--output"} <= flags


def test_only_options_on_the_line_are_passed_on() -> None:
    assert arguments.session_options(magics.parse_distribute_line("")) == {}
    line = "-b fsdp --gpus 0,2 --no-compile --clip none --fsdp-config '{\"version\": 2}' --auto"
    assert arguments.session_options(magics.parse_distribute_line(line)) == {
        "backend": "fsdp",
        "devices": "0,2",
        "compile": False,
        "clip": None,
        "fsdp_config": {"version": 2},
        "auto": True,
    }


def test_a_line_may_end_with_a_comment() -> None:
    line = "-b fsdp --config 'runs # 2.yaml' # don't offload"
    assert arguments.without_comment(line) == "-b fsdp --config 'runs # 2.yaml'"
    assert magics.parse_distribute_line("-b fsdp # 8 GPUs").backend == "fsdp"
    assert arguments.without_comment("load s3://bucket/a#b") == "load s3://bucket/a#b"


def test_a_misspelled_option_names_the_close_one() -> None:
    with pytest.raises(UsageError, match=r"no option --backnd\. Did you mean --backend\?"):
        magics.parse_distribute_line("--backnd=fsdp")


def test_what_needs_new_ranks_cannot_be_switched() -> None:
    with pytest.raises(UsageError, match="--auto"):
        arguments.PARSERS["switch"].parse_args(["--auto"])


def test_the_panel_sends_declared_options_within_their_limits() -> None:
    rules = commands.ARGUMENTS["switch"]
    assert rules.keys() - {"reset_optimizer"} <= strategies.ARGUMENTS.keys()
    assert rules["nproc"].check(4096)
    assert not rules["nproc"].check(4097)
    assert not rules["offload_params"].check("yes")
    assert not rules["backend"].check("x" * 65)


def test_a_new_option_reaches_every_parser() -> None:
    parser = arguments.command_parser("new", "")
    new = strategies.Argument(help="a new option", metavar="N", type=int, can_be_unset=True)
    arguments.add_session_argument(parser, "cpu_threads", new)
    assert parser.parse_args(["--cpu-threads", "3"]) == argparse.Namespace(
        help=False, cpu_threads=3
    )
    assert new.read("none") is None


if __name__ == "__main__":
    PAGE.write_text(page())
