#!/usr/bin/env python
"""Find loss spikes in the logs of a run, the documents read there, and the flags of a restart that
skips them."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.spikes.program")
