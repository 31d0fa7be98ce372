"""Access to sharded parameters: full or local values, deferred initialisation, weights from files."""
