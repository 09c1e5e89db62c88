"""Finds the bottleneck of a training step and estimates the speedup of changes.

It runs in the kernel and only processes what the ranks have measured. Read in this order:
``measurements`` (data of one rank), ``rank_comparison`` (waiting and stragglers), ``report``
(the profile), ``bottleneck`` (the verdict), ``speedup`` and ``what_if`` (predicted speedups),
``recommendations`` and ``backend_recommendations`` (which ``advice`` to give),
``advice_followup`` (the speedup measured afterwards), ``lint`` (static analysis of the cells).
"""
