"""Finds the bottleneck of a training step and estimates what a change would gain.

Pure arithmetic on what ranks have measured, in the kernel. Read in this order: `figures` (what
a rank sends), `compared` (whom ranks wait for), `result` (all of it, the verdict first),
`verdict`, `gains` and `calibrated` (what a change brings, by the planner), `changes` and
`engine` (which `advice` to give), `taken` (what it brought), `remark` and `lint` (what the
cell's text alone tells), `show`.
"""
