"""Records the profile of a training loop on a rank.

``profile_window`` decides when recording starts and stops; ``recorder`` installs and removes the
instrumentation; ``step_breakdown`` computes with time spans. The analysis runs in the kernel:
``nbdist.profiler``.
"""
