"""On the PYTHONPATH of programs in a copy of the source (tests/copies.py): Python does not look into
the checkout that is installed."""

import sys

sys.meta_path = [each for each in sys.meta_path if "__editable__" not in repr(each)]
sys.path = [each for each in sys.path if "__editable__" not in each]
