"""The engine: parameters in units, gradients reduced to shards, an optimizer over flat masters."""
