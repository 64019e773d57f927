#!/usr/bin/env python
"""Draw a pipeline schedule: what each stage computes when, the pipeline bubble, and the activations
it holds."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.lab.draw_schedule")
