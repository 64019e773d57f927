"""Packed rows: a worked example, a plain packer of lists, and folders that are wrong."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning import packed_dataset
from megatron.addons.finetuning.packed_dataset import (
    PackedDataset,
    PackedFile,
    PackedSampler,
    PackingRule,
)
from megatron.addons.finetuning.packed_samples import open_files
from megatron.addons.finetuning.tests.packed_files import Listed, build, write_file, write_pair
from megatron.data.data_order import data_order_fingerprint
from megatron.data.order_change import data_order_differences
from megatron.data.samples import Samples
from tests import problems
from tests.pairs import PairWriter

MODES = ("pieces", "blocks", "padded")


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


EXAMPLE = [ids(100, 5), ids(200, 3), ids(300, 11), ids(400, 5)]


def test_the_worked_example_label_by_label():
    rows = PackedFile(Listed(EXAMPLE), 7, PackingRule(4, 2))
    assert rows.order.tolist() == [0, 2, 1, 3] and len(rows) == 3
    tokens = [[*ids(100, 5), *ids(300, 3)], ids(303, 8), [*ids(200, 3), *ids(400, 5)]]
    labels = [
        [101, 102, 103, 104, 0, 301, 302, 303],
        [*ids(304, 7), 0],
        [201, 202, 0, 401, 402, 403, 404, 0],
    ]
    positions = [[0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 0]]
    for row in range(3):
        assert rows[row].tolist() == [tokens[row], labels[row], positions[row], [7] * 8], row
    blocks = PackedFile(Listed(EXAMPLE), 7, PackingRule(4, 2, "blocks"))
    labels[0][-1] = 0
    for row in range(3):
        assert blocks[row].tolist() == [
            tokens[row],
            labels[row],
            [0, 1, 2, 3, 0, 1, 2, 3],
            [7] * 8,
        ], row
    padded = PackedFile(Listed(EXAMPLE), 7, PackingRule(4, 2, "padded"))
    assert len(padded) == 2
    assert padded[0].tolist() == [
        [*ids(100, 4), *ids(300, 4)],
        [101, 102, 103, 0, 301, 302, 303, 0],
        [0, 1, 2, 3, 0, 1, 2, 3],
        [7] * 8,
    ]
    assert padded[1].tolist() == [
        [200, 201, 202, 400, 401, 402, 403, 0],
        [201, 202, 0, 401, 402, 403, 0, 0],
        [0, 1, 2, 0, 1, 2, 3, 0],
        [7] * 8,
    ]


def plainly(samples: list[list[int]], rule: PackingRule) -> list[list[list[int]]]:
    """The same by lists of (id, label, piece): a second reading of the rule."""
    kept = [sample for sample in samples if len(sample) >= rule.min_length]
    order = list(range(len(kept)))
    np.random.RandomState(1024).shuffle(order)
    length = rule.length
    found = []
    if rule.mode == "padded":
        for first in range(0, len(kept) - rule.rows + 1, rule.rows):
            cut = [kept[n][: rule.sequence_length] for n in order[first : first + rule.rows]]
            row = [
                [abs(t) for c in cut for t in c],
                [t for c in cut for t in [*c[1:], 0][: len(c)]],
                [p for c in cut for p in range(len(c))],
            ]
            for line in row[:2]:
                line += [0] * (length - len(line))
            row[2] += [p % rule.sequence_length for p in range(length - len(row[2]))]
            found.append(row)
    else:
        stream = [
            (t, label, n)
            for n in order
            for t, label in zip(kept[n], [*kept[n][1:], 0], strict=False)
        ]
        for first in range(0, len(stream) - length + 1, length):
            part = stream[first : first + length]
            positions = []
            for at, (_, _, n) in enumerate(part):
                begins = (
                    at == 0 or part[at - 1][2] != n or positions[-1] == rule.sequence_length - 1
                )
                positions.append(0 if begins else positions[-1] + 1)
            row = [[abs(t) for t, _, _ in part], [label for _, label, _ in part], positions]
            if rule.mode == "blocks":
                row[1][-1] = 0
                row[2] = [at % rule.sequence_length for at in range(length)]
            found.append(row)
    return [[row[0], [max(label, 0) for label in row[1]], row[2]] for row in found]


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_a_plain_packer(mode):
    random = np.random.default_rng(5)
    for trial in range(40):
        samples = [
            random.integers(-9, 99, random.integers(0, 30)).tolist()
            for _ in range(random.integers(1, 40))
        ]
        rule = PackingRule(
            int(random.integers(1, 9)), int(random.integers(1, 4)), mode, int(random.integers(0, 4))
        )
        rows = PackedFile(Listed(samples), 0, rule)
        plain = plainly(samples, rule)
        assert len(rows) == len(plain), (trial, rule)
        assert [rows[n][:3].tolist() for n in range(len(rows))] == plain, (trial, rule)


def numbers(dataset: PackedDataset, count: int) -> list[int]:
    return [
        dataset._ends[dataset.files.index(file)] + row
        for file, row in map(dataset.source, range(count))
    ]


def test_epochs_are_whole_batches_of_one_generator_that_goes_on():
    """As InternLM's sampler: shuffle 0 .. n - 1 anew each epoch with one RandomState(1024), drop
    what fills no batch."""
    files = [PackedFile(Listed([ids(n, 8)] * 7), 0, PackingRule(4, 2)) for n in (100, 200)]
    dataset = PackedDataset("two", files, ["a"], PackingRule(4, 2), size=36, rows_per_batch=4)
    assert (dataset.rows, dataset.rows_per_epoch) == (14, 12)
    random = np.random.RandomState(1024)
    wanted = []
    for _ in range(3):
        order = np.arange(14)
        random.shuffle(order)
        wanted += order[:12].tolist()
    assert numbers(dataset, 36) == wanted
    places = (wanted[35], wanted[0], wanted[20])
    assert [dataset[k].tolist() for k in (35, 0, 20)] == [
        files[n // 7][n % 7].tolist() for n in places
    ]
    whole = PackedDataset("two", files, ["a"], PackingRule(4, 2), size=None)
    assert sorted(numbers(whole, len(whole))) == ids(0, 14)


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 2), (2, 2), (4, 2), (4, 1), (8, 1)])
def test_a_global_batch_is_the_same_rows_on_any_number_of_ranks(dp_size, micro_batch):
    samplers = [PackedSampler(100, micro_batch, rank, dp_size) for rank in range(dp_size)]
    rows = 16 // micro_batch
    for step in range(5):
        consumed = range(16 * step, 16 * step + 16, micro_batch * dp_size)
        taken = [n for at in consumed for sampler in samplers for n in sampler.micro_batch(at)]
        assert taken == list(range(rows * step, rows * step + rows))
    with problems.raises(
        ValueError, "resume-inside-a-row", "--packed-samples", "--micro-batch-size"
    ):
        PackedSampler(100, 2).micro_batch(3)
    assert PackedSampler(100, 2, 0, 2).micro_batches_left(0) == 50


def test_the_subsets_are_the_directories_by_name(tmp_path):
    """Files in the order of their names; links are followed, z_ does not count."""
    random = np.random.default_rng(1)
    for name in ("cn/b", "cn/a", "cn/deep/c", "code/a", "z_cn/late"):
        samples = [random.integers(1, 900, random.integers(1, 20)).tolist() for _ in range(30)]
        write_pair(tmp_path / name, samples)
    os.symlink(tmp_path / "code", tmp_path / "en")
    (tmp_path / "a_plain_file.txt").write_text("counts for nothing")
    subsets, opened = open_files([str(tmp_path)])
    assert subsets == ["cn", "code", "en"]
    assert [(s, os.path.relpath(f.prefix, tmp_path)) for s, f in opened] == [
        ("cn", "cn/a"),
        ("cn", "cn/b"),
        ("cn", "cn/deep/c"),
        ("code", "code/a"),
        ("en", "en/a"),
        ("cn", "z_cn/late"),
    ]
    rows = build([str(tmp_path)], min_sample_length=3)[0]
    assert rows.subsets == ("cn", "code", "en") and rows.order()["min_length"] == 3
    found = {int(subset) for row in rows for subset in row[packed_dataset.SUBSET]}
    assert found == {0, 1, 2}
    alone = build([str(tmp_path / "cn/a"), str(tmp_path / "cn/b.bin")])[0]
    assert alone.subsets == ("a", "b")


def test_documents_of_several_sequences_are_samples(tmp_path):
    samples = [ids(1 + n, 2 + n % 7) for n in range(30)]
    once = build([write_pair(tmp_path / "once", samples)])[0]
    with PairWriter(tmp_path / "several", np.int32) as builder:
        for sample in samples:
            builder.add_document(np.array(sample, np.int32), [1, len(sample) - 1])
    again = build([str(tmp_path / "several")])[0]
    assert len(once) and all(np.array_equal(once[k], again[k]) for k in range(len(once)))


def test_what_the_order_of_the_rows_depends_on(tmp_path):
    """Each difference is told with its flag; paths and the length of the run are none."""
    samples = [ids(n, 9) for n in range(1, 60)]
    path = write_file(tmp_path / "a.bin", samples)
    other = write_file(tmp_path / "b.bin", samples[::-1] + [[1, 2]])
    os.makedirs(tmp_path / "moved")
    for end in ("bin", "idx"):
        os.symlink(f"{path[:-3]}{end}", tmp_path / f"moved/a.{end}")

    def differs(*words, **given) -> str:
        now = build(list(words) or [path], **given)[0]
        return "; ".join(data_order_differences(saved, data_order_fingerprint(now, None)))

    saved = data_order_fingerprint(build([path])[0], None)
    assert differs() == differs(str(tmp_path / "moved/a.bin")) == differs(sizes=(400, 0, 0)) == ""
    assert differs(other).startswith("train.corpus.sha256: ") and ";" not in differs(other)
    shorter = differs(min_sample_length=2)
    assert re.fullmatch(r"train.min_length: 0 .*, 2 .*\(--min-sample-length\)", shorter)
    assert "(--pack-into-one or --pad-samples)" in differs(pack_into_one=True)
    larger = differs(batch=6)
    assert re.fullmatch(r"train.rows_per_batch: 1 .*, 3 .*\(--global-batch-size\)", larger)
    assert re.match(r"train.rows: 2 .*, 1 .*\(--micro-batch-size\)", differs(rows=1))
    assert "(--seq-length)" in differs(seq=5)


def test_where_the_tokens_of_a_row_stand(tmp_path):
    random = np.random.default_rng(2)
    samples = [random.integers(1, 900, random.integers(1, 20)).tolist() for _ in range(30)]
    dataset = build(
        [write_file(tmp_path / "a.bin", samples), write_pair(tmp_path / "b", samples)],
        sizes=(90, 0, 0),
    )[0]
    raw = {prefix: Path(f"{prefix}.bin").read_bytes() for prefix in dataset.prefixes()}
    held: dict[tuple[str, int], dict[int, int]] = {}
    for k in range(len(dataset)):
        tokens = []
        for piece in dataset.spans_of(k):
            mine = samples[piece.document][piece.offset : piece.offset + piece.length]
            stored = raw[piece.prefix][piece.first_byte : piece.end_byte]
            assert np.frombuffer(stored, np.int32).tolist() == mine
            tokens += mine
            shown = held.setdefault((piece.prefix, piece.document), {})
            shown[k] = shown.get(k, 0) + piece.length
        assert tokens == dataset[k][packed_dataset.TOKENS].tolist()
    for prefix in dataset.prefixes():
        for document in range(30):
            assert dataset.samples_showing(prefix, document) == held.get((prefix, document), {}), (
                prefix,
                document,
            )
    with problems.raises(ValueError, "value-out-of-range", "--document", "30", "29"):
        dataset.samples_showing(dataset.prefixes()[0], 30)


@pytest.mark.parametrize(
    ("samples", "code", "named"),
    [
        ([[1, 2000], [3], [4]], "token-id-out-of-range", (" 2000", " 1000")),
        ([[1, 2]], "data-too-small", (" 1 train", " 2 x 4 ")),
    ],
    ids=["an id too large", "too few tokens"],
)
def test_files_that_cannot_be_read_are_refused_at_the_start(samples, code, named, tmp_path):
    path = Path(write_file(tmp_path / "en" / "a.bin", [ids(1, 9), ids(20, 9), ids(40, 9)]))
    assert len(build([str(tmp_path)])[0]) == 3
    write_file(path, samples)
    with problems.raises(ValueError, code, *named):
        build([str(tmp_path)])


def test_ids_that_the_vocabulary_lacks_are_told_where_they_stand(tmp_path):
    """In a row as a token, and behind a row's end, where it is only the last label."""
    path = write_file(tmp_path / "en" / "a.bin", [[*ids(1, 8), 5000, *ids(10, 7)]])
    samples = Samples(build([str(tmp_path)], vocab=None, batch=4)[0], 1000)
    for k in range(2):
        with pytest.raises(
            ValueError,
            match=rf"{path}: token 8 of document 0 .*\b5000, .*\b1000",
        ):
            samples[k]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a"],
            r"a\.bin: .*\(en\), .*packed-subset-unclear",
        ),
        (
            ["en/cn/a", "cn/b"],
            r"en/cn/a\.bin: .*\(cn, en\), .* 2 of them \(cn, en\).*packed-subset-unclear",
        ),
    ],
)
def test_a_file_must_belong_to_one_subset(names, message, tmp_path):
    for name in [*names, "en/fine"]:
        write_file(tmp_path / f"{name}.bin", [ids(1, 9)])
    with pytest.raises(ValueError, match=message):
        open_files([str(tmp_path)])


def test_what_a_row_shows_is_what_shows_the_document(tmp_path):
    """spans_of and samples_showing are each other's inverse."""
    words = [
        write_pair(tmp_path / name, [ids(1, n) for n in (7, 3, 9, 12, 5) * 4]) for name in "AB"
    ]
    train, _, _ = build(words, sizes=(20, 0, 0), seq=8, rows=1)
    held = {}
    for k in range(len(train)):
        for piece in train.spans_of(k):
            counts = held.setdefault((piece.prefix, piece.document), {})
            counts[k] = counts.get(k, 0) + piece.length
    assert held
    for prefix in train.prefixes():
        for document in range(20):
            assert train.samples_showing(prefix, document) == held.get((prefix, document), {})
