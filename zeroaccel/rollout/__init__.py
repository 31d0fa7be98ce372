"""Weights for programs that generate: streams of all of them, deltas, and where they go."""

from __future__ import annotations

from zeroaccel.rollout.receiver import Channel, Packet, WeightReceiver, WeightsRefusedError
from zeroaccel.rollout.sinks import ChannelSink, FileSink, SafetensorsSink, Sink, send

__all__ = [
    "Channel",
    "ChannelSink",
    "FileSink",
    "Packet",
    "SafetensorsSink",
    "Sink",
    "WeightReceiver",
    "WeightsRefusedError",
    "send",
]
