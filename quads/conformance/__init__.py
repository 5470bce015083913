"""Conformance: run anyone's NVFP4 quantiser, product or grouped product, and say which bits are wrong and why."""
