"""Traces a torch module with fake tensors: its wrap units and the memory of one micro-batch.

Needs torch, so it runs on a rank, or in a child process of whoever asks. It knows nothing of
sessions and engines.
"""
