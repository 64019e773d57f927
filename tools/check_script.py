#!/usr/bin/env python
"""Say what a launch script of Megatron-LM would do here: see docs/features/megatron_cli.md."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import feature_program

if __name__ == "__main__":
    feature_program.run("megatron_cli", "check_script")
