"""The profile of a training loop, as one rank records it.

`steps` finds the optimizer's steps, at the cost of one look at an attribute while nothing is
profiled. `window` decides when recording begins and ends; `recording` puts in place what it
takes and removes all of it. `intervals` and `partition` are plain arithmetic on spans of time.
The kernel's process judges: `nbdist.profiler`.
"""
