"""Storage of shards and masters: on the device, in host memory, in files."""
