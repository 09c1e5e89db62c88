"""Finds the bottleneck of a training step and estimates the speedup of changes.

It runs in the kernel and only processes what the ranks have measured. Read in this order:
``measurements`` (data of one rank), ``profile_data`` (all ranks: waiting and stragglers),
``bottleneck`` (the verdict), ``what_if`` (predicted speedups, and speeds for later plans),
``select_recommendations`` and ``option_recommendations`` (which ``advice`` to give), ``lint``
(remarks on the cell), ``profile`` (the profile as users see it).
"""
