"""A data set of the Hugging Face hub as JSON Lines: hf://ORG/NAME, streamed by the library
`datasets`, where that is installed."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SCHEME = "hf://"
_WORD = re.compile(r"hf://([\w-]+/[\w.-]+?)(?::([\w.-]+))?(?:@([\w.-]+))?(?:/([\w.-]+))?")


class HubFile(NamedTuple):
    """What was fetched: a file, and the data set with its configuration, revision and split."""

    path: str
    origin: str


def problems(words: Sequence[str]) -> Iterator[str]:
    """Why data sets cannot be fetched, before the network is used."""
    for word in words:
        if not _WORD.fullmatch(word):
            yield (
                f"--input {word}: must be hf://ORG/NAME, with :CONFIG, @REVISION or /SPLIT behind "
                "it in this order [value-malformed]"
            )
    if words and importlib.util.find_spec("datasets") is None:
        yield f"--input {words[0]}: needs datasets; pip install datasets [package-missing]"


def fetched(word: str, prefix: str) -> HubFile:
    """Stream the data set to a file beside the output, unless this revision is there. Raises
    ValueError where the hub does not give it."""
    import datasets
    import huggingface_hub

    match = _WORD.fullmatch(word)
    assert match is not None  # `problems` refuses others
    name, config, revision, split = match.groups()
    split = split or "train"
    try:
        sha = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
        origin = f"{name}{f':{config}' if config else ''}@{sha}/{split}"
        path = f"{prefix}_{re.sub(r'[^A-Za-z0-9.-]', '_', origin)}.jsonl"
        if not os.path.exists(path):
            print(f"{origin}: streamed to {path}", flush=True)
            rows = datasets.load_dataset(name, config, split=split, revision=sha, streaming=True)
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            os.replace(f"{path}.part", path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        raise ValueError(
            f"--input {word}: the hub does not give it ({reason}); hf download {name} --repo-type "
            "dataset --local-dir DIR elsewhere, then --input DIR [file-not-readable]"
        ) from None
    return HubFile(path, origin)
