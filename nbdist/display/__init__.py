"""The elements of all views as text and HTML, and the panel without widgets."""
