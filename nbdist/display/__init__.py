"""Text and HTML views of plans, profiles and the panel, and the formatting of their numbers."""
