"""Interrupts on a rank: stop at an optimizer step, report progress, abort collectives."""
