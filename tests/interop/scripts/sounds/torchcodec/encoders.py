"""`torchcodec.encoders`: datasets imports its class, but the generated data are files already."""

from __future__ import annotations


class AudioEncoder:
    """Has no methods: nothing encodes."""
