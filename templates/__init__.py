"""Configuration files to start from, as package data: `importlib.resources.files("zeroaccel.templates")`."""
