#!/usr/bin/env python
"""Import checkpoints from other formats and export them: Hugging Face, Megatron-LM,
Megatron-DeepSpeed and others. See docs/convert.md."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.convert.program")
