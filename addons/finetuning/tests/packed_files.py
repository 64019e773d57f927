"""Files of packed samples, and the data sets built of them."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from megatron.addons.finetuning.feature import FinetuningConfig
from megatron.addons.finetuning.packed_samples import Packed
from megatron.data.request import DataRequest
from tests.core.data.corpora import data_flags
from tests.pairs import PairWriter


class Listed:
    """Samples that are lists."""

    prefix = "listed"

    def __init__(self, samples):
        self.samples = samples
        self.lengths = np.array([len(sample) for sample in samples], np.int64)

    def read(self, sample, first, count):
        return np.array(self.samples[sample][first : first + count], np.int64)

    def bytes_of(self, sample, first, count):
        return None

    def fingerprint(self):
        return repr(self.samples).encode()


def write_pair(prefix: Path, samples: list[list[int]]) -> str:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with PairWriter(prefix, np.int32) as builder:
        for sample in samples:
            builder.add_document(np.array(sample, np.int32), [len(sample)])
    return str(prefix)


def write_file(path: Path, samples: list[list[int]]) -> str:
    """X.bin and X.idx; the path of the first."""
    return write_pair(path.with_suffix(""), samples) + ".bin"


def build(words, sizes=(None, 0, 0), seq=4, rows=2, batch=2, vocab=1000, source=None, **given):
    """`source`: with more than pairs."""
    own = {
        field.name: given.pop(field.name)
        for field in fields(FinetuningConfig)
        if field.name in given
    }
    flags = data_flags(train_data_path=words, **given)
    request = DataRequest(
        sequence_length=seq,
        micro_batch_size=rows,
        global_batch_size=batch,
        sizes=sizes,
        vocab_size=vocab,
    )
    packing = FinetuningConfig(**own)
    packed = replace(source or Packed(), mode=packing.mode, min_length=packing.min_sample_length)
    return packed.build(flags, request, [])
