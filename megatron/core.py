"""megatron.core of PyPI's megatron-core, where it is installed, though this suite comes first on
Python's path; of a script of Megatron-LM what an add-on has instead."""

import sys
from importlib.util import module_from_spec

from megatron import addons

addons.load_import_finders()
_paths = [each for each in sys.modules["megatron"].__path__ if each != __file__.rpartition("/")[0]]
_specs = (each.find_spec(__name__, _paths) for each in sys.meta_path)
_spec = next((each for each in _specs if each and each.origin != __file__), None)
if _spec is None or _spec.loader is None:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
