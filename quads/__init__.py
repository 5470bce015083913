"""QUADS: NVFP4 rollouts for reinforcement learning of MoE language models."""

__version__ = "0.1.0"
