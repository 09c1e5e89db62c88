"""Everything that runs on a rank."""
