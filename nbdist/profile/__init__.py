"""Where the time of a step goes, and what would make it faster.

Pure arithmetic on what ranks have measured, in the kernel. Read in this order: `figures` (what
a rank sends), `result` (all ranks together, the verdict first), `verdict`, `advice` and `gains`
(through the planner), `lint` (what the cell's text alone tells), `show`.
"""
