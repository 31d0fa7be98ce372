"""Optimizers and schedules: creates them from a config, classifies them for sharding, compares them between ranks."""
