"""Faults and guarantees, one row each, with the expected behavior.

Used by `fault_table.py`, which prints the table of `make faults` and writes docs/faults.md, and by
`test_rows.py`: each row has a test marked `@pytest.mark.fault("B1")`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    id: str
    fault: str
    expect: str
    """Expected behavior."""
    deadline_s: float | None = None
    """Time limit, which the tests check; None if there is none."""


GROUPS = {
    "A": "Start",
    "B": "Death of a process",
    "C": "Collectives and interrupts",
    "D": "Cells and output",
    "E": "Checkpoints and switches",
    "F": "Memory and other resources",
    "G": "Panel",
    "N": "Several machines",
    "S": "Security",
}

ROWS = (
    Row("A1", "the port of the rendezvous is taken", "two sessions start on one machine"),
    Row(
        "A2",
        "a rank dies while it starts",
        "its rank, exit code and last output lines are reported",
        2,
    ),
    Row("A3", "ranks start very slowly", "progress is shown, and no rank is reported as dead"),
    Row("A4", "more ranks than devices, unknown devices", "refused before anything starts"),
    Row("A5", "started twice at once", "one launcher, one session"),
    Row("A6", "environment of another launcher (RANK, MASTER_ADDR)", "not passed to the ranks"),
    Row("A7", "the kernel has used torch, OpenMP, Accelerate", "the ranks are not affected"),
    Row("A8", "a temp folder path too long for a Unix socket", "a shorter private folder is used"),
    Row("A9", "a private folder with another owner, linked or not writable", "refused, and named"),
    Row("A10", "too few file descriptors", "the limit and the required number are named"),
    Row("A11", "DeepSpeed is not installed", "reported at the start; other backends work"),
    Row(
        "A12", "a hostile or invalid config file", "read as plain values; the invalid key is named"
    ),
    Row("B1", "SIGKILL of an idle rank", "rank and signal are reported, the others end", 2),
    Row("B2", "SIGKILL of a rank in a collective", "the cell fails and names that rank", 2),
    Row("B3", "SIGKILL of the launcher", "no rank is left, the session reports the cause", 2),
    Row(
        "B4",
        "SIGTERM or SIGHUP of the launcher",
        "everything shuts down in order, after a checkpoint if SIGTERM ends a training",
        5,
    ),
    Row("B5", "the kernel is restarted during a cell", "no process is left", 3),
    Row("B6", "SIGKILL of the kernel", "no process is left", 3),
    Row("B7", "SIGSTOP of a rank", "reported as stopped, not dead; it can be resumed or ended"),
    Row("B8", "exit() or quit() in a cell", "one message; the rank keeps running"),
    Row("B9", "os._exit(0) on one rank", "the cell fails and names that rank", 2),
    Row("B10", "a crash in native code", "the signal is named, with the rank's stack", 2),
    Row("B11", "a rank that cannot be killed", "stop() returns in time and names the process"),
    Row("B12", "a killed rank had child processes", "they end too", 5),
    Row("B13", "a reused process ID", "another process is never signaled"),
    Row("B14", "a launcher that is a zombie process", "reported as dead, not running", 2),
    Row("B15", "a megabyte on file descriptors 1 and 2", "it is read; the rank does not block"),
    Row("B16", "an error in the launcher itself", "the cell shows it"),
    Row(
        "B17",
        "SIGTERM of the kernel, a rank or a node's agent during training",
        "all ranks stop after the same optimizer step and save; the next session resumes",
    ),
    Row("C1", "one rank alone in a collective", "reports who waits where, and who is missing", 10),
    Row("C2", "Stop in Python code", "all ranks stop; variables and group are kept", 1),
    Row("C3", "Stop in a stuck collective", "aborted, group recreated, variables kept", 10),
    Row("C4", "a SIGINT that reaches one rank only", "the others are interrupted too", 10),
    Row("C5", "one rank raises before a collective", "its error is shown while the others wait", 2),
    Row("C6", "tensors of different shapes in a collective", "an error that names both sides"),
    Row("C7", "tensors of different types in a collective", "an error that names both sides"),
    Row("C8", "different collectives on different ranks", "an error that names both sides"),
    Row("C9", "the process group has timed out", "it is recreated, or reported as broken"),
    Row("C10", "all ranks stuck in different groups", "aborted as in C3", 10),
    Row("C11", "objects prepared before the group was recreated", "usable again, or named"),
    Row("C12", "repeated Stops, at any moment", "nothing is left behind or half done"),
    Row("C13", "a slow rank or a long cell", "reported as slow, never terminated"),
    Row("C14", "the clock jumps, the machine sleeps", "no rank is reported as dead"),
    Row("C15", "a cell destroys the process group, as scripts do", "the session's groups are kept"),
    Row(
        "C16",
        "the last reference to a process group is dropped",
        "no rank deadlocks with its threads",
    ),
    Row(
        "C17",
        "Stop while a rank spins or sleeps in C, holds the GIL or is stopped",
        "it is named; a second Stop returns the prompt, a third ends the ranks",
    ),
    Row("D1", "20,000 displays, 200,000 lines per rank", "counted, bounded memory, the cell ends"),
    Row("D2", "one text of 200 MB", "truncated, with its size; bounded memory"),
    Row(
        "D3",
        "progress bars, escape codes, bytes that are not text",
        "shown without affecting others",
    ),
    Row(
        "D4",
        "input(), getpass(), breakpoint(), pdb without a keyboard",
        "an immediate error; never a prompt",
    ),
    Row("D5", "a thread prints after its cell", "shown under the rank's label"),
    Row("D6", "a syntax error, an empty cell", "reported once; nothing is sent"),
    Row("D7", "ranks that do not exist or cannot be parsed", "one message; nothing is evaluated"),
    Row("D8", "the same error on all ranks", "shown once"),
    Row("D9", "a value that cannot be sent, or is very large", "refused, with an alternative"),
    Row("D10", "a cell while another one runs", "refused or queued; status replies immediately"),
    Row("D11", "no front end", "everything works without one"),
    Row("D12", "a cell that fails on some ranks", "it fails; each rank's error is shown"),
    Row("D13", "replayed, forged or garbled messages", "ignored; nothing runs, no log grows"),
    Row(
        "D14",
        "a rank ends, or the front end disconnects, while a rank is stopped in the debugger",
        "the prompt closes; a message says why; the session is usable",
    ),
    Row("E1", "SIGKILL during a save", "a partial checkpoint is never listed"),
    Row("E2", "SIGKILL while a checkpoint is replaced", "the old one is complete"),
    Row("E3", "one rank cannot write", "no checkpoint; the rank and the reason are named"),
    Row("E4", "the disk is full", "no checkpoint, and no file of it"),
    Row("E5", "the power fails at any moment of a save", "files are synced before the rename"),
    Row("E6", "a file is too short, too long, empty", "refused before it is read; it is named"),
    Row("E7", "one bit has changed", "detected by its checksum"),
    Row("E8", "files missing or too many, a newer format", "refused; it is named"),
    Row("E9", "a checkpoint that would run code", "nothing runs unless --trust is given"),
    Row("E10", "names that lead out of the folder", "refused"),
    Row("E11", "another number of ranks, another backend", "it is loaded"),
    Row("E12", "another model", "refused before anything is changed"),
    Row("E13", "two saves at once, a save during a cell", "one after the other"),
    Row("E14", "Stop during a save or load", "no partial checkpoint; the previous state"),
    Row("E15", "a switch fails midway", "the previous state is restored; the phase is named"),
    Row("E16", "training continues from a checkpoint", "bitwise identical losses"),
    Row("E17", "a folder that cannot be written", "reported before anything is copied"),
    Row("E18", "other files next to checkpoints", "only old checkpoints of nbdist are removed"),
    Row("E19", "one rank runs out of memory while state moves", "the previous state, on all ranks"),
    Row("F1", "the machine runs out of memory", "the cause is named"),
    Row("F2", "one rank has a low memory limit", "MemoryError on that rank; the others continue"),
    Row("F3", "a cell runs out of memory", "its tensors are freed before the next cell"),
    Row("F4", "device memory after the end", "it is free, or its owner is named"),
    Row(
        "F5",
        "files of killed sessions in shared memory",
        "removed by the next start, if they are ours",
    ),
    Row("F6", "invalid input to the planner", "one message that names the value"),
    Row(
        "F7", "a thousand cells, restarts and switches", "memory, descriptors, threads do not grow"
    ),
    Row("F8", "a model config that wants to run code", "it runs nothing"),
    Row("G1", "names and errors that contain HTML", "shown as text"),
    Row("G2", "forged or malformed messages from the page", "ignored; one line in the log"),
    Row("G3", "a panel in a saved notebook", "static HTML with its date"),
    Row("G4", "a thousand changes per second", "at most five messages per second"),
    Row("G5", "an error in a command", "shown in the panel; the kernel is unaffected"),
    Row("N1", "a rank ends on another node", "reported with its node; all other ranks end", 5),
    Row("N2", "an agent ends", "the cell fails with the node's name; all nodes end", 5),
    Row("N3", "a node is cut off", "the cell fails with the node's name; the node ends itself", 15),
    Row("N4", "the kernel is killed", "every node ends everything", 15),
    Row("N5", "ranks of several nodes wait in a collective", "Stop interrupts them", 10),
    Row("N6", "an agent does not start", "its node and the reason are reported; nothing is left"),
    Row("N7", "a node has another folder", "reported at the start, and save() writes nothing", 15),
    Row("S1", "listening sockets", "none outside of 127.0.0.1 and private folders"),
    Row("S2", "sockets of the ranks", "in a folder that only this user can enter"),
    Row("S3", "messages that run code", "signed; anything else runs nothing"),
    Row("S4", "TCP between kernel and ranks", "encrypted, or refused"),
    Row("S5", "keys", "in no argument, log, output, notebook or checkpoint"),
    Row("S6", "pickle and eval", "never applied to received data or files"),
    Row("S7", "files from strangers", "loading them runs nothing"),
    Row("S8", "a torch version with a known vulnerability", "refused for files from strangers"),
    Row("S9", "the rendezvous of torch", "nbdist's own; never the one that unpickles"),
    Row("S10", "the store of the process group", "no one else can write to it"),
    Row("S11", "gloo and NCCL", "on the loopback interface"),
    Row("S12", "debug servers", "none"),
    Row("S13", "signals", "only to processes that nbdist started"),
    Row("S14", "private folders", "with another owner, linked or open: refused"),
    Row("S15", "names and paths", "plain names, inside the folder"),
    Row("S16", "the panel's page", "text only; nothing is fetched, no inline script"),
    Row("S17", "a saved notebook", "opening it runs no code of nbdist"),
    Row("S18", "secrets in the environment", "not in nbdist's logs"),
    Row("S19", "the planner", "does not use the network or run a model's code"),
    Row("S20", "floods of garbage", "logs and outputs are bounded"),
    Row("S21", "what is built and installed", "exact versions; the list of files is checked"),
    Row("S22", "SECURITY.md", "states what is defended, and how to report"),
    Row("S23", "the network between nodes", "one port, encrypted, restricted to the nodes' keys"),
)
