"""What the command line of internlm-import can name."""

from __future__ import annotations

# (up matrix, down matrix) of the feed-forward layers.
MLP_ORDERS = {"w2-up": ("w2", "w3"), "w2-down": ("w3", "w2")}
