"""Configuration files to start from, as package data; read them with `importlib.resources.files("zeroaccel.templates")`."""
