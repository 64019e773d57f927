#!/usr/bin/env python
"""Shell completion of the flags of megatron-pretrain; see addons/lab."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.lab.completion")
