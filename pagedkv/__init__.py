"""A paged KV cache for LLM inference on CPU."""
