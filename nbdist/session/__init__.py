"""What runs in the notebook's own process: sessions, cells, output. Never imports torch."""
