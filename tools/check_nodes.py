#!/usr/bin/env python
"""Ranks that are slow, compute wrong numbers or do not answer: devices and links of a job, before
a run."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.ops.nodes.program")
