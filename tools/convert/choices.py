"""What the command line of tools/convert_checkpoint.py can name. Imports no torch, so that --help
is immediate."""

from __future__ import annotations

# Keys of tools/convert/families.py's FAMILIES.
FAMILY_NAMES = ("gpt2", "internlm", "internlm2", "llama", "mistral", "qwen2", "qwen3")
# (up matrix, down matrix) of InternLM's feed-forward layers.
MLP_ORDERS = {"w2-up": ("w2", "w3"), "w2-down": ("w3", "w2")}
