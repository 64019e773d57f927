#!/usr/bin/env python
"""Turn an InternLM python config into an .args file: see addons/internlm."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.internlm.config")
