"""Interrupts on a rank: at an optimizer step, between phases, or by aborting collectives."""
