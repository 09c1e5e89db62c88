"""Looking at a torch module: its units, its living bytes, a trace of it without its data.

Needs torch, so it runs on a rank, or in a child process of whoever asks. It knows nothing of
sessions and engines.
"""
