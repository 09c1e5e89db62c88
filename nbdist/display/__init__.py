"""Plans, profiles and the panel as text and HTML, and the units of their figures."""
