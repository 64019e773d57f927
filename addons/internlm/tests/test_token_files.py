"""X.bin of JSON lines with X.bin.meta: the same rows as pairs, and what is wrong is said; the
generated samples of the demos."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning.packed_dataset import PackedFile, PackingRule
from megatron.addons.finetuning.packed_samples import Packed
from megatron.addons.finetuning.tests.packed_files import write_pair
from megatron.addons.internlm.feature import InternlmConfig
from megatron.addons.internlm.read_config import read_config
from megatron.addons.internlm.tests.lines import build, write_lines
from megatron.addons.internlm.token_files import JsonlTokens, _load_meta
from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests import problems
from tests.core.config.checks.checked_flags import BASE, checked
from tests.problems import codes_of

GENERATED = InternlmConfig.adds["dummy_data"]["internlm"].make()


PACKED = BASE.replace("--mock-data", "--packed-samples")


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_lines_and_pairs_are_the_same_rows(tmp_path):
    random = np.random.default_rng(1)
    files = {
        name: [random.integers(1, 900, random.integers(1, 20)).tolist() for _ in range(30)]
        for name in ("cn/b", "cn/a", "code/a")
    }
    for name, samples in files.items():
        write_lines(tmp_path / "lines" / f"{name}.bin", samples, np.int32)
        write_pair(tmp_path / "pairs" / name, samples)
    lines, pairs = (
        build([str(tmp_path / kind)], min_sample_length=3)[0] for kind in ("lines", "pairs")
    )
    assert len(lines) == len(pairs) > 30 and lines.subsets == pairs.subsets == ("cn", "code")
    assert all(np.array_equal(lines[k], pairs[k]) for k in range(len(lines)))
    assert lines.order() != pairs.order()
    for span in lines.spans_of(7):
        line = Path(f"{span.prefix}.bin").read_bytes()[span.first_byte : span.end_byte]
        samples = files[os.path.relpath(span.prefix, tmp_path / "lines")]
        assert json.loads(line)["tokens"] == samples[span.document]
    mixed = build([str(tmp_path / "pairs/cn/a"), str(tmp_path / "lines/cn/b.bin")])[0]
    assert mixed.subsets == ("a", "b")


def wrong_meta(change):
    def damage(path: Path) -> None:
        meta = np.load(f"{path}.meta")
        with open(f"{path}.meta", "wb") as file:
            np.save(file, change(meta))

    return damage


def put(row, column, value):
    def change(meta):
        meta[row, column] = value
        return meta

    return change


META = "packed-meta-malformed"
DAMAGE = {
    "no meta": (lambda p: os.remove(f"{p}.meta"), "packed-meta-missing", ""),
    "no array": (lambda p: Path(f"{p}.meta").write_bytes(b"[[0, 5]]"), META, ".npy"),
    "a pickle": (wrong_meta(lambda m: m.astype(object)), META, ".npy"),
    "one column": (wrong_meta(lambda m: m[:, 0]), META, "int64 [3]"),
    "floats": (wrong_meta(lambda m: m.astype(float)), META, "float64 [3, 2]"),
    "beyond the file": (wrong_meta(put(2, 0, 4000)), META, "entry 2 "),
    "before the file": (wrong_meta(put(1, 0, -1)), META, " -1"),
    "negative length": (wrong_meta(put(1, 1, -4)), META, " -4 "),
    "both indexes": (
        lambda p: Path(str(p)[:-4] + ".idx").touch(),
        "packed-format-ambiguous",
        "a.idx",
    ),
}


@pytest.mark.parametrize(("damage", "code", "named"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_at_the_start(damage, code, named, tmp_path):
    path = Path(write_lines(tmp_path / "en" / "a.bin", [ids(1, 9), ids(20, 9), ids(40, 9)]))
    assert len(build([str(tmp_path)])[0]) == 3
    damage(path)
    with problems.raises(Exception, code, path, named):
        build([str(tmp_path)])


LINES = {
    "another length": b'{"tokens": [1, 2]}',
    "no tokens": b'{"text": "a"}',
    "no JSON": b'{"tokens": [1, 2',
    "floats": b'{"tokens": [1.5, 2]}',
    "lists": b'{"tokens": [[1], [2, 3]]}',
    "true": b'{"tokens": [true, false]}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_not_what_its_meta_says(line, tmp_path):
    path = write_lines(tmp_path / "en" / "a.bin", [ids(1, 9), ids(20, 9), ids(40, 9)])
    data = Path(path).read_bytes().split(b"\n")
    start = len(data[0]) + 1
    data[1] = line.ljust(len(data[1]))
    Path(path).write_bytes(b"\n".join(data))
    with problems.raises(ValueError, "data-file-damaged", path, f"sample 1, at byte {start}: "):
        JsonlTokens(path).read(1, 0, 9)
    assert JsonlTokens(path).read(2, 3, 2).tolist() == [43, 44]


def test_lines_in_any_order_and_without_a_last_line_end(tmp_path):
    path = write_lines(tmp_path / "a.bin", [ids(1, 9), ids(20, 9), ids(40, 9)])
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    wrong_meta(lambda meta: meta[::-1])(Path(path))
    assert [JsonlTokens(path).ids(n)[0] for n in range(3)] == [40, 20, 1]


def test_the_dummy_data_of_the_demos():
    """1,212,475,002 tokens, 296,014 rows of 4,096, in less memory than the samples as lists by
    three orders."""
    file = PackedFile(GENERATED.open(2048), 0, PackingRule(2048, 2))
    assert (len(file.file.lengths), file.tokens, len(file)) == (1_000_000, 1_212_475_002, 296_014)
    random = np.random.RandomState(1999)
    n = random.randint(1, 30, size=1_000_000)
    r = random.randint(10, 200, size=1_000_000)
    for sample in (0, 1, 77, 999_999):
        whole = ([int(n[sample]), int(r[sample])] + list(range(n[sample])) * int(r[sample]))[:2048]
        assert file.file.read(sample, 0, len(whole)).tolist() == whole and file.file.lengths[
            sample
        ] == len(whole)
        assert (
            file.file.read(sample, 1, 5).tolist() == whole[1:6]
            and file.file.read(sample, 7, 3).tolist() == whole[7:10]
        )
    kept = file.order.nbytes + file.ends.nbytes + file.file.lengths.nbytes
    assert kept < 20_000_000, kept
    with problems.raises(ValueError, "token-id-out-of-range", "--dummy-data", "199", "100"):
        build(None, dummy_data="internlm", vocab=100, source=Packed(generated=GENERATED))


def test_a_line_of_samples_is_bounded(tmp_path):
    path = write_lines(tmp_path / "x.bin", [[1, 2], [3]])
    Path(path).write_bytes(b"")
    os.truncate(path, 8 << 30)
    with problems.raises(ValueError, "data-file-damaged"):
        JsonlTokens(path).ids(1)


@pytest.mark.parametrize("read", [lambda path: _load_meta(str(path), 100), read_config])
def test_pipes_devices_and_directories_are_refused(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises((ValueError, OSError)):
            read(path)


def test_generated_samples_need_no_file_and_are_never_left_out():
    wrong, notes = checked("--dummy-data internlm --min-sample-length 50", base=PACKED)
    assert not wrong and codes_of(notes) == ["flag-has-no-effect"]
    line = command_line.read(f"{PACKED} --dummy-data internlm".split(), {}, tree=RunConfig)
    assert line.config.data.tokenizer == "NullTokenizer"


def test_folders_are_looked_at_before_the_start(tmp_path):
    flags = f"--tokenizer-type NullTokenizer --train-data-path {tmp_path}"
    (tmp_path / "en").mkdir()
    (tmp_path / "en/a.bin").touch()
    [line] = checked(flags, base=PACKED)[0]
    problems.assert_problem(line, "packed-meta-missing", f"{tmp_path}/en/a.bin", ".bin.meta")
    (tmp_path / "en/a.bin.meta").touch()
    for word in ("", "/en/a", "/en/a.bin"):
        assert checked(flags + word, base=PACKED)[0] == []
