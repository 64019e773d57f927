#!/usr/bin/env python
"""Serve a trained model by OpenAI's HTTP API: tools/serve.py CHECKPOINT. See docs/serving.md."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.serving.program")
