"""Text and HTML views of plans, profiles and the panel."""
