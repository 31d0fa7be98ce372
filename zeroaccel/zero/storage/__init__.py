"""Where shards and masters live: on the device, in host memory, in files."""
