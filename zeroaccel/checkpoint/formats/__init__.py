"""Checkpoint formats of other projects: DeepSpeed, torch.distributed.checkpoint, and torch's pickles."""
