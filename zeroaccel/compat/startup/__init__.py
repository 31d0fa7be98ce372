"""Holds the `sitecustomize` that carries the facade into child processes; see `zeroaccel.compat.finder`."""
