"""Access to sharded parameters: full or local values, deferred initialization, weights from files."""
