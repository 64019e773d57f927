"""Where in this suite's code, or a script's, a process stands."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path


def code_location(frames: Sequence[traceback.FrameSummary]) -> str:
    """`function (file:line)` of the innermost frame that is neither torch's nor Python's."""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
    own_frames = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    frame = (own_frames or list(frames))[-1]
    return f"{frame.name} ({_below_the_top(Path(frame.filename))}:{frame.lineno})"


def _below_the_top(file: Path) -> str:
    """The path from `megatron`, `tools` or `tests` on; of other code, its last three parts."""
    tops = [
        index for index, folder in enumerate(file.parts) if folder in ("megatron", "tools", "tests")
    ]
    return "/".join(file.parts[tops[-1] if tops else -3 :])
