"""On the PYTHONPATH of `make test-portable`: the C++ of this tree counts as not built, as on a
machine without a compiler or with another processor."""

import sys


class Unbuilt:
    """Refuses the extensions before another finder finds them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("megatron.") and name.endswith(("_cpp", "_v3", "_v4")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Unbuilt)
