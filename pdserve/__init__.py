"""pdserve: prefill/decode serving for vLLM models, with a KV transfer layer that proves what it moved."""

__version__ = "0.1.0"
