"""The ledger of a run in stages: what the run read is what the data sets give, and of each data set
no token is repeated or lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.stages.lines import staged
from megatron.config.command_line import planned
from megatron.data.ledger import MASK, read_ledger, sample_hash, tokens_hash
from megatron.data.request import Before, DataRequest
from megatron.features.registry import RunConfig
from megatron.training.feature import data_source
from tests.pairs import PairWriter
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

TOKENS = {"a": 350, "b": 200}
STAGES = """
[[stage]]
until_iterations = 2
data-path = ["0.7", "{0}/a", "0.3", "{0}/b"]
data-ledger = "{0}/1"

[[stage]]
data-path = ["0.4", "{0}/a", "0.6", "{0}/b"]
seq-length = 48
global-batch-size = 4
data-ledger = "{0}/2"
"""


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_what_a_run_reads(tmp_path, order):
    random = np.random.default_rng(1)
    for name, count in TOKENS.items():
        with PairWriter(tmp_path / name, np.int32) as builder:
            ends = [0, *sorted(set(random.integers(1, count, 9).tolist())), count]
            for first, end in zip(ends, ends[1:], strict=False):
                builder.add_document(np.arange(first, end), [end - first])
    file = tmp_path / "stages.toml"
    file.write_text(STAGES.format(tmp_path))
    argv = with_flags(
        [*SMALL, *NO_DROPOUT, "--data-path", f"{tmp_path}/a", "--split", "100,0,0"],
        *("--stages", str(file), "--save", str(tmp_path / "save"), "--train-iters", "5"),
        *("--position-embedding-type", "rope", "--max-position-embeddings", "64"),
        *("--vocab-size", "400", "--eval-iters", "0", "--data-order", order),
    )
    train(tmp_path / "run", argv)

    line, problems = planned(argv, 1, RunConfig)
    assert not problems
    own = next(group for group in vars(line.config).values() if hasattr(group, "stage_file"))
    before = None
    read = {name: Counter() for name in TOKENS}
    for each in staged(replace(line, words=argv), own):
        length, records = read_ledger(str(tmp_path / str(each.stage.number)))
        assert length == each.config.model.seq_length
        assert records["iteration"].tolist() == list(range(each.first + 1, each.last + 1))
        request = DataRequest(sizes=(each.samples[1], 0, 0), sequence_length=length, before=before)
        data, _, _ = data_source(each.config).build(each.config.data, request, [])
        number = each.samples[0]
        for record in records:
            assert record["first"] == number
            hashes = 0
            for number in range(number, number + int(record["count"])):  # noqa: B020
                sample = data[number]
                hashes += sample_hash(number, tokens_hash(sample))
                name = Path(data.datasets[data.source(number)[0]].name).name
                read[name].update(sample[:-1].tolist())
            assert record["hash"] == hashes & MASK
            number += 1
        assert number == each.samples[1]
        before = Before({**data.order()}, number)
    for name, counts in read.items():
        often = [counts[token] for token in range(TOKENS[name])]
        assert counts.total() > TOKENS[name]
        assert max(often) - min(often) <= 1
