#!/usr/bin/env python
"""Check that with --use-mup what a model learns in a step does not depend on its width: train
models of several widths for a few steps with and without it, and print how far activations move."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.lab.coord_check")
