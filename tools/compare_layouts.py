#!/usr/bin/env python
"""Train one small model with experts in one process and in eight parallel layouts, and print how
far each is from the one process."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.lab.compare_layouts")
