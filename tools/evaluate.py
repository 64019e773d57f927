#!/usr/bin/env python
"""Perplexity and bits per byte of texts: tools/evaluate.py CHECKPOINT FILE... Needs the checkpoint
and its vocabulary."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.ops.evaluate")
