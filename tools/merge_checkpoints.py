#!/usr/bin/env python
"""Write the weighted mean of the weights of several checkpoints as a checkpoint of its own, which
stands for a decay of the learning rate over them."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.averaging.merge_checkpoints")
