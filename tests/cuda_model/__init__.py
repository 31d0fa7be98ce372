"""CUDA without a GPU: the engine on fake `cuda:0` tensors, and a model of streams, host and memory.

docs/cuda_model.md describes the model and its use. `python -m tests.cuda_model` prints its table.
"""
