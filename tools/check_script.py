#!/usr/bin/env python
"""Say what a launch script of Megatron-LM would do here; see addons/megatron_cli."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.megatron_cli.check_script")
