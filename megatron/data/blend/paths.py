"""A word of --data-path that is a directory or a pattern, as the prefixes it stands for."""

import glob
import os

from megatron.data.indexed_dataset import idx_path
from megatron.data.parts import part_set

PARTIAL = ".partial-"  # in names of pairs that are being written


def expand(word: str) -> list[str]:
    """The prefixes that `word` names, in the order of their names: itself if it is a prefix; all
    pairs and sets of parts below a directory, or those that a pattern (`data/part-*`, with or
    without .idx or .bin) finds.

    Raises FileNotFoundError for a directory or pattern without pairs. A word that is nothing of all
    that is returned as it is: whoever opens it has the message.
    """
    if os.path.exists(idx_path(word)) or part_set.is_set(word):
        return [word]
    if os.path.isdir(word):
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(word) for name in names]
        problem = f"{word}: the directory holds no .idx"
    elif glob.has_magic(word):
        stem, suffix = os.path.splitext(word)
        pattern = stem if suffix in (".idx", ".bin") else word
        patterns = (idx_path(pattern), pattern, part_set.plan_path(pattern))
        paths = [path for each in patterns for path in glob.glob(each, recursive=True)]
        problem = f"{word}: no .idx has a name like this"
    else:
        return [word]
    sets = {folder: part_set.set_of(folder) for folder in set(map(os.path.dirname, paths))}
    pairs = {path for path in paths if path.endswith(".idx")}  # and parts, which are none
    alone = {path for path in pairs if not sets[os.path.dirname(path)]}
    complete = {path[:-4] for path in alone if PARTIAL not in os.path.basename(path)}
    prefixes = sorted({prefix for prefix in sets.values() if prefix} | complete)
    if not prefixes:
        raise FileNotFoundError(
            f"{problem}; make data with tools/preprocess_data.py [data-not-found]"
        )
    return prefixes
