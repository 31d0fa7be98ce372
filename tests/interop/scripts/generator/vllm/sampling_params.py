"""A name that TRL imports."""


class StructuredOutputsParams:
    """Rules for generated text; unused here."""
