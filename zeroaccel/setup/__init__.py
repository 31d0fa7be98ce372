"""Set-up: turns the arguments of a caller into a plan that all ranks agree on, and the plan into an engine."""
