"""Checkpoints: bytes with names, written without pickle, never half, and loadable on any number of ranks.

The format is docs/checkpoint_format.md. `manifest` and `rank_file` are the format; `contents` says what an engine has
to save, `save` and `background` write it, `load` reads it back, `engine` gives the engine the calls. `manifest`,
`rank_file` and `find` import neither torch nor anything of the engine.
"""
