"""Checkpoint formats of others: DeepSpeed's, torch.distributed.checkpoint's, torch's pickles."""
