"""What the command line of tools/convert_checkpoint.py can name. Imports no torch, so that --help
is immediate."""

from __future__ import annotations

# Keys of tools/convert/family_table.py's FAMILIES.
FAMILY_NAMES = (
    *("apertus", "arcee", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "granite", "helium", "internlm", "internlm2", "internlm3", "jais2", "llama"),
    *("ministral", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "persimmon"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2",),
)
# (up matrix, down matrix) of InternLM's feed-forward layers.
MLP_ORDERS = {"w2-up": ("w2", "w3"), "w2-down": ("w3", "w2")}
