"""Collective operations on all ranks: save, load, switch, resize, export, import."""
