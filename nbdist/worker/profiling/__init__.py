"""Records the profile of a training loop on a rank.

``optimizer_hooks`` detects optimizer steps, at the cost of one attribute access while no profile
is active. ``window`` decides when recording starts and stops; ``recorder`` installs and removes
the instrumentation. ``intervals`` and ``step_breakdown`` compute with time spans. The analysis
runs in the kernel: ``nbdist.profiler``.
"""
