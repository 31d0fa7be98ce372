"""Like vLLM's package."""
