"""A model as the planner needs it: analytic formulas for known architectures, or a trace."""
