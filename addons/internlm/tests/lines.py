"""Token files as InternLM's tools write them, and the data sets built of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from megatron.addons.finetuning.packed_samples import Packed
from megatron.addons.finetuning.tests import packed_files
from megatron.addons.internlm.feature import InternlmConfig

FORMATS = InternlmConfig.sample_formats
build = partial(packed_files.build, source=Packed(formats=FORMATS))


def write_lines(path: Path, samples: list[list[int]], dtype=np.int64) -> str:
    """X.bin and X.bin.meta as InternLM's tokenizer tools write them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    at = 0
    meta = []
    with open(path, "wb") as file:
        for sample in samples:
            line = json.dumps({"tokens": sample}).encode() + b"\n"
            file.write(line)
            meta.append((at, len(sample)))
            at += len(line)
    with open(f"{path}.meta", "wb") as file:
        np.save(file, np.array(meta, dtype))
    return str(path)
