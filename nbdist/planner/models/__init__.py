"""Models as `spec.ModelSpec`s: closed forms of known architectures, or a trace."""
