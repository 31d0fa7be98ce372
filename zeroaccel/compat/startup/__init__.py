"""Folder with the `sitecustomize` that installs the facade in child processes; see `zeroaccel.compat.finder`."""
