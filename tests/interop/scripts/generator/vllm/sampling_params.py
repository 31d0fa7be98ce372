"""A name that TRL imports."""


class StructuredOutputsParams:
    """Rules for what is generated, of which there are none here."""
