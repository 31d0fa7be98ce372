"""Replaces torchcodec, whose library needs FFmpeg: the names by which datasets decodes WAV files."""

from torchcodec import decoders, encoders

__all__ = ["decoders", "encoders"]
