"""Our data pipeline against megatron-core's on random cases: files both ways, indices, samples,
blends, helpers."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.blend.blended_dataset import BlendedDataset, parse_blend
from megatron.data.blend.splits import parse_split, split_range
from megatron.data.gpt_dataset import GPTDataset, MockGPTDataset, MockSequences
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess.dataset_writer import optimal_dtype
from tests.core.data.corpora import build_datasets, data_flags, write_corpus
from tests.pairs import PairWriter

pytestmark = [
    pytest.mark.peers,
    # megatron-core's, with numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
pytest.importorskip("megatron.core")

from megatron.core.datasets import (  # noqa: E402
    blended_dataset,
    blended_megatron_dataset_builder,
    blended_megatron_dataset_config,
    gpt_dataset,
    indexed_dataset,
    utils,
)

SPLITS = ("train", "valid", "test")


class Tokenizer:
    """As much of a tokenizer as megatron-core's datasets ask for."""

    vocab_size = 1000
    eod = 999
    pad = -1
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012


def peer_config(sequence_length, seed, **more):
    return gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **more,
    )


def peer_dataset(prefix, sequences, samples, split, sequence_length, seed):
    low_level = indexed_dataset.IndexedDataset(prefix)
    indices = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    config = peer_config(sequence_length, seed, split="1,1,1", blend=([prefix], None))
    return gpt_dataset.GPTDataset(low_level, prefix, indices, samples, utils.Split[split], config)


def tokens_of(peer_sample) -> list[int]:
    return [*peer_sample["tokens"].tolist(), int(peer_sample["labels"][-1])]


def random_documents(random):
    return [
        [random.integers(0, 60000, random.integers(1, 30)) for _ in range(random.integers(0, 4))]
        for _ in range(random.integers(1, 15))
    ]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_are_byte_equal_and_read_both_ways(tmp_path, dtype):
    random = np.random.default_rng(0)
    for case in range(15):
        documents = random_documents(random)
        peer = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "peer.bin"), dtype=dtype)
        with PairWriter(tmp_path / "ours", dtype) as ours:
            for document in documents:
                flat = np.concatenate([np.zeros(0, np.int64), *document])
                lengths = [len(part) for part in document]
                ours.add_document(flat, lengths)
                peer.add_document(torch.from_numpy(flat), lengths)
        peer.finalize(str(tmp_path / "peer.idx"))
        for end in (".bin", ".idx"):
            assert (tmp_path / f"ours{end}").read_bytes() == (
                tmp_path / f"peer{end}"
            ).read_bytes(), case
        if not any(documents):
            continue
        read = (
            IndexedDataset(tmp_path / "peer"),
            indexed_dataset.IndexedDataset(str(tmp_path / "ours")),
        )
        assert len(read[0]) == len(read[1]) == sum(map(len, documents))
        for index in range(len(read[0])):
            assert read[0][index].tolist() == read[1][index].tolist()
            assert read[0].get(index, 1).tolist() == read[1].get(index, 1).tolist()
        assert read[0].document_indices.tolist() == read[1].document_indices.tolist()


def test_the_dtype_of_a_vocabulary():
    for size in (None, 100, 65499, 65500, 65536, 200000):
        assert np.dtype(indexed_dataset.DType.optimal_dtype(size)) == optimal_dtype(size)


def test_gpt_dataset_on_random_cases(tmp_path):
    """Documents, samples and shuffles, and every sample's tokens: 1 to many epochs, the last one
    separate or not."""
    random = np.random.default_rng(2)
    seen = {"separate": 0, "several": 0, "one": 0}
    for case in range(60):
        lengths = random.integers(1, random.integers(2, 80), random.integers(2, 40))
        prefix = write_corpus(tmp_path / f"{case}", lengths, seed=case)
        sequence_length = int(random.integers(2, 24))
        first = int(random.integers(0, len(lengths) // 2))
        sequences = range(first, int(random.integers(first + 1, len(lengths) + 1)))
        tokens = int(lengths[sequences.start : sequences.stop].sum())
        if tokens <= sequence_length:
            continue
        most = max(2, 4 * tokens // sequence_length)
        samples = None if case % 10 == 9 else int(random.integers(1, most))
        split = SPLITS[case % 3]
        peer = peer_dataset(prefix, sequences, samples, split, sequence_length, case)
        ours = GPTDataset(
            IndexedDataset(prefix),
            sequence_length=sequence_length,
            num_samples=samples,
            seed=case,
            sequences=sequences,
            index_split=split,
        )
        assert len(ours) == len(peer)
        for name in ("document_index", "sample_index", "shuffle_index"):
            mine = getattr(ours, name)
            theirs = getattr(peer, name)
            assert mine.dtype == theirs.dtype and (mine == theirs).all(), (case, name)
        for index in range(len(ours)):
            assert ours[index].tolist() == tokens_of(peer[index])
            query = peer._query_document_sample_shuffle_indices(index)
            assert [piece[0] for piece in ours.locate(index)] == query[1].tolist()
        plan = ours.plan
        seen[
            "separate" if plan.separate_last_epoch else "several" if plan.num_epochs > 1 else "one"
        ] += 1
    assert all(count > 5 for count in seen.values()), seen


def test_mock_data():
    peer_low = gpt_dataset.MockGPTLowLevelDataset(Tokenizer())
    ours_low = MockSequences(1000, 999)
    assert (peer_low.sequence_lengths == ours_low.sequence_lengths).all()
    config = peer_config(512, 1234)
    sequences = split_range(parse_split("1,1,1")[1], 100_000)
    indices = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    peer = gpt_dataset.MockGPTDataset(peer_low, None, indices, 100, utils.Split.valid, config)
    ours = MockGPTDataset(
        ours_low, sequence_length=512, num_samples=100, seed=1234, sequences=sequences
    )
    assert len(peer) == len(ours)
    for index in range(0, len(ours), 5000):
        assert ours[index].tolist() == tokens_of(peer[index])


def test_split_and_blend_grammar():
    for split in (
        "949,50,1",
        "969, 30, 1",
        "1,1,1",
        "0.5,0.25",
        "7",
        "98/2",
        "0,3,5",
        "1,0,1",
        "33.3,33.3,33.4",
    ):
        vector = blended_megatron_dataset_config.parse_and_normalize_split(split)
        assert parse_split(
            split
        ) == blended_megatron_dataset_config.convert_split_vector_to_split_matrix(vector)
    for blend in (
        ["a"],
        ["a", "b"],
        ["1", "a"],
        ["0.3", "a", "0.7", "b"],
        ["3", "a", "b"],
        [" 5", "a ", "1e2", "b"],
    ):
        assert parse_blend(blend) == tuple(utils.get_blend_from_list(blend))


def peer_build(sizes, sequence_length, seed, **config):
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset,
        list(sizes),
        lambda: True,
        peer_config(sequence_length, seed, **config),
    )
    return builder.build()


def assert_same_samples(ours, peer):
    assert (ours is None) == (peer is None)
    if ours is None:
        return
    assert len(ours) == len(peer)
    if isinstance(ours, BlendedDataset):
        assert isinstance(peer, blended_dataset.BlendedDataset)
        assert (ours.dataset_index == peer.dataset_index).all()
        assert (ours.dataset_sample_index == peer.dataset_sample_index).all()
    for index in range(0, len(ours), max(1, len(ours) // 100)):
        assert ours[index].tolist() == tokens_of(peer[index])


def test_whole_builds_on_random_cases(tmp_path):
    """Single corpora, weighted and unweighted blends, one split for all and data of each split."""
    random = np.random.default_rng(4)
    for case in range(24):
        prefixes = [
            write_corpus(
                tmp_path / f"{case}-{part}",
                random.integers(2, 60, random.integers(30, 90)),
                seed=part,
            )
            for part in range(random.integers(1, 5))
        ]
        words = list(prefixes)
        if case % 2:
            words = [
                w
                for prefix in prefixes
                for w in (str(round(float(random.random()) + 0.05, 3)), prefix)
            ]
        sizes = tuple(int(n) for n in random.integers(1, 400, 3))
        if case % 2 == 0 and case % 4:
            sizes = (None, sizes[1], None)
        sequence_length = int(random.integers(4, 20))
        blend = utils.get_blend_from_list(words)
        if case % 3:
            split = ("80,15,5", "70,30,0", "100,0,0")[int(random.integers(3))]
            ours = build(data_flags(data_path=words, split=split), sizes, sequence_length, case)
            peer = peer_build(sizes, sequence_length, case, blend=blend, split=split)
        else:
            ours = build(
                data_flags(train_data_path=words, valid_data_path=words[-1:]),
                sizes,
                sequence_length,
                case,
            )
            per_split = [blend, utils.get_blend_from_list(words[-1:]), None]
            peer = peer_build(sizes, sequence_length, case, blend_per_split=per_split)
        for mine, theirs in zip(ours, peer, strict=True):
            assert_same_samples(mine, theirs)


def build(flags: types.SimpleNamespace, sizes, sequence_length, seed):
    return build_datasets(
        flags, sequence_length=sequence_length, seed=seed, sizes=sizes, vocab_size=1000, eod=999
    )


def test_an_exhaustive_blend_equals_the_peers(tmp_path):
    prefixes = [
        write_corpus(tmp_path / name, [9] * n, seed=n)
        for name, n in (("a", 30), ("b", 11), ("c", 70))
    ]
    ours = build(data_flags(data_path=prefixes, split="60,20,20"), (None, None, None), 5, 3)
    peer = peer_build((None, None, None), 5, 3, blend=(prefixes, None), split="60,20,20")
    for mine, theirs in zip(ours, peer, strict=True):
        assert mine.size is None
        assert_same_samples(mine, theirs)


def test_the_peers_cache_is_never_taken_for_ours(tmp_path):
    prefix = write_corpus(tmp_path / "d", [9] * 60, seed=1)
    build(data_flags(data_path=[prefix], split="80,10,10"), (50, 5, 5), 5, 3)
    before = {path.name for path in Path(prefix, "cache", "GPTDataset_indices").iterdir()}
    peer_build((50, 5, 5), 5, 3, blend=([prefix], None), split="80,10,10")
    after = {path.name for path in Path(prefix, "cache", "GPTDataset_indices").iterdir()}
    assert len(before) == 12 and len(after) == 24 and before < after
