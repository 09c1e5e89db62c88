"""Where launchers run: on this machine, or on the nodes of Ray or Slurm through agents.

An engine gives a fleet: something that holds launchers and the channels to their ranks. To the
rooms above all fleets are alike. Runs in the notebook's kernel (`processes`, `local` and
`channel` also in the agent of a node). Called by `kernel` and `node` only.
"""
