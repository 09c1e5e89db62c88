"""The output of several ranks as one notebook cell: rate limit, lines, deduplication, display."""
