"""What can go wrong, and what must happen then: one row for each fault and each promise.

Read by `table.py`, which prints the table of `make faults` and writes docs/faults.md, and by
`test_rows.py`: a row has a test marked `@pytest.mark.fault("B1")`, or a reason in `WHY_NOT`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    id: str
    fault: str
    expect: str
    """What must happen."""
    deadline_s: float | None = None
    """Within this time, which its tests hold; None where no time is promised."""


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
    Row("A2", "a rank dies while it starts", "rank, exit code and its last lines are told", 2),
    Row("A3", "ranks start very slowly", "progress is shown, and no rank is called dead"),
    Row("A4", "more ranks than devices, unknown devices", "refused before anything starts"),
    Row("A5", "started twice at once", "one launcher, one session"),
    Row("A6", "environment of another launcher (RANK, MASTER_ADDR)", "the ranks do not see it"),
    Row("A7", "the kernel has used torch, OpenMP, Accelerate", "the ranks are not affected"),
    Row("A8", "a temp folder too long for a Unix socket", "a short private folder is used"),
    Row("A9", "a private folder that is foreign, linked or not writable", "refused, named"),
    Row("A10", "too few file descriptors", "the limit and the need are named"),
    Row("A11", "DeepSpeed is not installed", "said at the start; other backends work"),
    Row("A12", "a hostile or wrong config file", "read as plain values; the wrong key is named"),
    Row("B1", "SIGKILL of an idle rank", "rank and signal are told, the others end", 2),
    Row("B2", "SIGKILL of a rank in a collective", "the cell fails and names that rank", 2),
    Row("B3", "SIGKILL of the launcher", "no rank stays, the session says so", 2),
    Row("B4", "SIGTERM or SIGHUP of the launcher", "everything ends in order", 5),
    Row("B5", "the kernel is restarted during a cell", "no process stays", 3),
    Row("B6", "SIGKILL of the kernel", "no process stays", 3),
    Row("B7", "SIGSTOP of a rank", "it is called stopped, not dead, and can go on or be ended"),
    Row("B8", "exit() or quit() in a cell", "one sentence; the rank stays"),
    Row("B9", "os._exit(0) on one rank", "the cell fails and names that rank", 2),
    Row("B10", "a crash in native code", "the signal is named, with the rank's stack", 2),
    Row("B11", "a rank that cannot be killed", "the stop ends in time and names the process"),
    Row("B12", "a killed rank had children", "they end too", 5),
    Row("B13", "a process number that was given again", "a foreign process is never signalled"),
    Row("B14", "a dead launcher that nobody has waited for", "it is dead, not running", 2),
    Row("B15", "a megabyte on file descriptors 1 and 2", "it is read; the rank does not block"),
    Row("B16", "an error in the launcher itself", "the cell shows it"),
    Row("C1", "one rank alone in a collective", "who waits where, and who is not there", 10),
    Row("C2", "Stop in Python code", "all ranks stop; variables and group are kept", 1),
    Row("C3", "Stop in a stuck collective", "freed, group made again, variables kept", 10),
    Row("C4", "a SIGINT that reaches one rank only", "the others are stopped too", 10),
    Row("C5", "one rank raises before a collective", "its error is shown while the others wait", 2),
    Row("C6", "tensors of different shapes in a collective", "an error that names both sides"),
    Row("C7", "tensors of different types in a collective", "an error that names both sides"),
    Row("C8", "different collectives on different ranks", "an error that names both sides"),
    Row("C9", "the group has timed out", "the group is made again, or said to be broken"),
    Row("C10", "all ranks stuck in different groups", "freed as in C3", 10),
    Row("C11", "objects prepared before the group was made again", "used again, or named"),
    Row("C12", "Stop again and again, at any moment", "nothing is left, nothing is half"),
    Row("C13", "a slow rank or a long cell", "called slow, never ended"),
    Row("C14", "the clock jumps, the machine sleeps", "no rank is called dead"),
    Row("C15", "a cell ends the process group, as scripts do", "the session's groups stay"),
    Row("C16", "the last reference to a process group goes", "no rank deadlocks with its threads"),
    Row(
        "C17",
        "Stop while a rank spins or sleeps in C, holds the GIL or is stopped",
        "it is named; a second Stop returns the prompt, a third ends the ranks",
    ),
    Row("D1", "20,000 displays, 200,000 lines a rank", "counted, bounded memory, the cell ends"),
    Row("D2", "one text of 200 MB", "cut, with its size told; bounded memory"),
    Row("D3", "progress bars, escapes, bytes that are no text", "shown without harm to others"),
    Row("D4", "input(), getpass(), breakpoint(), pdb", "an error at once; never a prompt"),
    Row("D5", "a thread prints after its cell", "shown under the rank's label"),
    Row("D6", "a syntax error, an empty cell", "said once; nothing is sent"),
    Row("D7", "ranks that do not exist or cannot be read", "one sentence; nothing is evaluated"),
    Row("D8", "the same error on all ranks", "shown once"),
    Row("D9", "a value that cannot be sent, or is very large", "refused, with what to do instead"),
    Row("D10", "a cell while another one runs", "refused or in order; status answers at once"),
    Row("D11", "no front end", "everything works without one"),
    Row("D12", "a cell that fails on some ranks", "it fails; each rank's error is told"),
    Row("D13", "replayed, forged or garbled messages", "ignored; nothing runs, no log grows"),
    Row("E1", "SIGKILL during a save", "half a checkpoint is never listed"),
    Row("E2", "SIGKILL while a checkpoint is replaced", "the old one is whole"),
    Row("E3", "one rank cannot write", "no checkpoint; the rank and the reason are named"),
    Row("E4", "the disk is full", "no checkpoint, and no file of it"),
    Row("E5", "the power fails at any moment of a save", "files first, then the name"),
    Row("E6", "a file is too short, too long, empty", "refused before it is read; it is named"),
    Row("E7", "one bit has changed", "found by its checksum"),
    Row("E8", "files missing or too many, a newer format", "refused; it is named"),
    Row("E9", "a checkpoint that would run code", "nothing runs unless asked to trust it"),
    Row("E10", "names that lead out of the folder", "refused"),
    Row("E11", "another number of ranks, another backend", "it is loaded"),
    Row("E12", "another model", "refused before anything is changed"),
    Row("E13", "two saves at once, a save during a cell", "one after the other"),
    Row("E14", "Stop during a save or load", "no half checkpoint; the state of before"),
    Row("E15", "a switch fails half-way", "the state of before; the phase is named"),
    Row("E16", "training goes on from a checkpoint", "bitwise the same losses"),
    Row("E17", "a folder that cannot be written", "said before anything is copied"),
    Row("E18", "what else lies beside checkpoints", "only our own old checkpoints are removed"),
    Row("E19", "one rank lacks memory while state moves", "the state of before, on all ranks"),
    Row("F1", "the machine's memory ends", "the cause is named"),
    Row("F2", "one rank may use little memory", "MemoryError on that rank; the others go on"),
    Row("F3", "a cell runs out of memory", "its tensors are gone before the next cell"),
    Row("F4", "device memory after the end", "it is free, or its holder is named"),
    Row("F5", "files of killed sessions in shared memory", "removed by the next start, if ours"),
    Row("F6", "the planner is fed nonsense", "one sentence that names the value"),
    Row("F7", "a thousand cells, restarts and switches", "memory, descriptors, threads flat"),
    Row("F8", "a model config that wants to run code", "it runs nothing"),
    Row("G1", "names and errors that are HTML", "shown as text"),
    Row("G2", "forged or malformed messages of the page", "ignored; one line in the log"),
    Row("G3", "a panel in a saved notebook", "a page without script that says when"),
    Row("G4", "a thousand changes a second", "at most five messages a second"),
    Row("G5", "an error in a command", "shown in the panel; the kernel is fine"),
    Row("N1", "a rank ends on another node", "told with its node; all other ranks end", 5),
    Row("N2", "an agent ends", "the cell ends with the node's name, all nodes with it", 5),
    Row("N3", "a node is cut off", "the cell ends with the node's name; the node ends itself", 15),
    Row("N4", "the kernel is killed", "every node ends everything", 15),
    Row("N5", "ranks of several nodes wait in a collective", "Stop frees them", 10),
    Row("N6", "an agent does not start", "told which, and why; nothing stays"),
    Row("N7", "a node has another folder", "told at the start, and save() writes nothing", 15),
    Row("S1", "who listens", "nothing outside of 127.0.0.1 and private folders"),
    Row("S2", "sockets of the ranks", "in a folder that only we can enter"),
    Row("S3", "messages that run code", "signed; anything else runs nothing"),
    Row("S4", "TCP between kernel and ranks", "encrypted, or refused"),
    Row("S5", "keys", "in no argument, log, output, notebook or checkpoint"),
    Row("S6", "pickle and eval", "never of what came over a wire or from a file"),
    Row("S7", "files of strangers", "loading runs nothing"),
    Row("S8", "a torch with a known hole", "refused for files of strangers"),
    Row("S9", "the rendezvous of torch", "ours; never the one that unpickles"),
    Row("S10", "the store of the process group", "no stranger can write to it"),
    Row("S11", "gloo and NCCL", "on the loopback interface"),
    Row("S12", "debug servers", "none"),
    Row("S13", "signals", "only to processes that we started"),
    Row("S14", "private folders", "foreign, linked or open ones are refused"),
    Row("S15", "names and paths", "plain names, inside the folder"),
    Row("S16", "the panel's page", "text only; nothing is fetched, no inline script"),
    Row("S17", "a saved notebook", "opening it runs nothing of ours"),
    Row("S18", "secrets in the environment", "not in our logs"),
    Row("S19", "the planner", "opens no connection, runs no code of a model"),
    Row("S20", "floods of garbage", "logs and outputs are bounded"),
    Row("S21", "what is built and installed", "exact versions; the list of files is held"),
    Row("S22", "SECURITY.md", "says what is defended, and how to report"),
    Row("S23", "the network between nodes", "one port, encrypted, for the nodes' own keys"),
)

WHY_NOT: dict[str, str] = {}
"""Rows without a test, with the reason."""
