"""The `Accelerator` and its parts: Hugging Face accelerate's interface over the engine."""
