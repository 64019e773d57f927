#!/usr/bin/env python
"""How fast a run would be on so many GPUs, with which layout, how long and at what cost."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.planner.program")
