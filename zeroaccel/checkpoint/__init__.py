"""Checkpoints: sharded safetensors files and a manifest, no pickle, committed atomically, loadable on any world size.

docs/checkpoint_format.md describes the format; `manifest` and `rank_file` implement it. `save_plan` collects the
tensors and values to save, `save` and `background_save` write and commit them, `loader` reads them back,
`checkpointer` implements the engine's calls. `manifest`, `rank_file` and `find` import neither torch nor the engine.
`formats` has the readers and writers for checkpoints of DeepSpeed and of torch.distributed.checkpoint.
"""
