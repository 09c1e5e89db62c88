"""Where ranks are, and how they are reached: this machine, or the nodes of a cluster.

An engine gives a fleet: something that holds launchers and the channels to their ranks. To the
rooms above all fleets are alike. Runs in the notebook's kernel (`processes`, `local` and
`channel` also in the agent of a node). Called by `kernel` and `node` only.
"""
