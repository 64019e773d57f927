#!/usr/bin/env python
"""Where the time of runs went: training, start-up, checkpoints, lost steps, failures, restarts."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.ops.goodput.program")
