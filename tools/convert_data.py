#!/usr/bin/env python
"""Convert token data between InternLM's format and Megatron's: see docs/features/internlm.md."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools.shared import feature_program

if __name__ == "__main__":
    feature_program.run("internlm", "token_data")
