"""Reaching sharded parameters: full or local values, deferred initialisation, weights from files."""
