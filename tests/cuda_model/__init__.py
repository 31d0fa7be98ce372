"""CUDA without a GPU: the engine on fake `cuda:0` tensors, and a model of what streams, host and memory would do.

docs/cuda_model.md says what the model knows and how to run it. `python -m tests.cuda_model` prints its table.
"""
