"""The file beside NVIDIA's pretrain_gpt.py of 2026, for a script that comes without it."""

from megatron.training import gpt_builder

__all__ = ["gpt_builder"]
