"""Optimizers and schedules: made from a config, judged for sharding, compared between ranks."""
