"""Traces a torch module with fake tensors: its wrap units and the memory of one micro-batch.

Needs torch, so it runs on a rank, or in a child process. It does not depend on sessions and
engines.
"""
