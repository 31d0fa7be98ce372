"""Weight streams to inference programs: all weights or deltas, with their sinks and the receiver."""

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
