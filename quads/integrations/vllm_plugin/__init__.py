"""The inside of the vLLM plugin. Import `quads.integrations.vllm` instead."""
