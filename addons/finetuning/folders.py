"""A folder of token files: FOLDER/SUBSET/X.bin, whose directories are the subsets."""

import os
from collections.abc import Sequence

from megatron.data.blend.paths import PARTIAL
from megatron.data.token_bytes import without_note


def token_files(folder: str) -> list[str]:
    """Every .bin file below a folder: directories and files in the order of their names, those of a
    directory before its sub-directories; links are followed. Raises FileNotFoundError if there is
    none."""
    paths = []
    for path, directories, names in os.walk(folder, followlinks=True):
        directories.sort()
        paths += [
            os.path.join(path, name)
            for name in sorted(map(without_note, names))
            if name.endswith(".bin") and PARTIAL not in name
        ]
    if not paths:
        raise FileNotFoundError(
            f"{folder}: the directory holds no .bin; give a folder with one "
            "directory per subset (FOLDER/SUBSET/X.bin), or a prefix written by "
            "tools/preprocess_data.py [packed-folder-without-data]"
        )
    return paths


def subset_names(folder: str) -> list[str]:
    """The subsets of a folder: its directories in the order of their names. One whose name is
    another's behind z and _ (z_en next to en) is no subset of its own, it only sorts last."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    return [
        name for name in names if not (name.lstrip("z_") != name and name.lstrip("z_") in names)
    ]


def subset_of(path: str, folder: str, names: Sequence[str]) -> str:
    """Which subset a file below `folder` belongs to: the one whose name a directory on the way has,
    but for z and _ in front. Raises ValueError if that is none, or several."""
    on_the_way = os.path.relpath(path, folder).split(os.sep)[:-1]
    matching = [
        name
        for name in names
        if any(name in (directory, directory.lstrip("z_")) for directory in on_the_way)
    ]
    if len(matching) != 1:
        index = (
            f"belongs to {len(matching)} of them ({', '.join(matching)})"
            if matching
            else "belongs to none of them"
        )
        choice = ", ".join(names) or "there are none"
        raise ValueError(
            f"{path}: the subsets of {folder} are its directories ({choice}), and this "
            f"file {index}; move it, or rename a directory [packed-subset-unclear]"
        )
    return matching[0]
