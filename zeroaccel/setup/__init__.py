"""Set-up: from what a caller says to an engine, by way of a plan that all ranks agree on."""
