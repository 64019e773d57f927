"""`from megatron import get_args`, with which scripts of Megatron-LM before 2024 begin."""

import sys

from megatron import training

sys.modules[__name__] = training.get_args  # type: ignore[assignment]
