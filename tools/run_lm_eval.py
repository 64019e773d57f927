#!/usr/bin/env python
"""Run lm-eval on a checkpoint without converting it: tools/run_lm_eval.py CHECKPOINT -- ARGUMENTS.
Needs the package lm-eval."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.ops.run_lm_eval")
