"""The notebook's side of a session: start ranks, run cells, collect metrics; without torch."""
