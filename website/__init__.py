"""Makes the documentation site: pages from notebooks and code, for mkdocs."""
