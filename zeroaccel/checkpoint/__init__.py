"""Checkpoints: sharded safetensors files and a manifest, no pickle, committed atomically, loadable on any world size.

The format is docs/checkpoint_format.md; `manifest` and `rank_file` implement it. `save_plan` collects what an engine
has to save, `save` and `background_save` write and commit it, `loader` reads it back, `checkpointer` gives the engine
the calls. `manifest`, `rank_file` and `find` import neither torch nor anything of the engine. `formats` has the readers
and writers for checkpoints of DeepSpeed and of torch.distributed.checkpoint.
"""
