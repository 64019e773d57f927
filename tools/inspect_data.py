#!/usr/bin/env python
"""Inspect training data: check pairs, show documents, list samples; see addons/datasets."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import room_program

if __name__ == "__main__":
    room_program.run("megatron.addons.datasets.inspect_data")
