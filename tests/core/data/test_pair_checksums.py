"""Every single bit that flips in the files of a pair or of its index cache is named before a sample
is read, or changes nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.pair_checksums import verify_tokens, write_sums
from tests import problems
from tests.load_tool import load_tool
from tests.pairs import PairWriter

PREPROCESS = load_tool("preprocess_data")
VOCAB = 1000


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A small pair with documents of 0 to 9 tokens, written by preprocess_data.py."""
    numbers = np.random.default_rng(3)
    lines = [
        json.dumps({"text": " ".join(map(str, numbers.integers(0, VOCAB, n).tolist()))})
        for n in (5, 9, 1, 0, 7, 3)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    command = "--workers 1 --tokenizer-type NullTokenizer --vocab-size 1000".split()
    files = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "x")]
    assert PREPROCESS.main([*files, *command]) == 0
    return str(tmp_path / "x_text_document")


def flips(path: Path, every: int = 1) -> Iterator[int]:
    """Flip each bit (or one of so many) of a file in turn; afterwards the file is as it was."""
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), every):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield bit
    path.write_bytes(data)


def test_every_bit_of_the_tokens_is_found(prefix):
    path = Path(f"{prefix}.bin")
    for bit in flips(path):
        with problems.raises(ValueError, "data-file-damaged", str(path)):
            verify_tokens(prefix)
            raise AssertionError(f"bit {bit}")
    assert verify_tokens(prefix)


def test_pointers_are_compared_with_the_running_sum_of_lengths(tmp_path, capsys):
    """A pair without checksums: each flipped pointer is named."""
    prefix = str(tmp_path / "x")
    with PairWriter(prefix, np.uint16) as builder:
        for length in (5, 2, 9, 1, 4):
            builder.add_document(np.arange(length), [length])
    path = Path(f"{prefix}.idx")
    data = path.read_bytes()
    first = 34 + 4 * 5
    for bit in range(8 * first, 8 * (first + 8 * 5)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"x\.(idx|bin): "):
            IndexedDataset(prefix).check()
            raise AssertionError(f"bit {bit}")
    changed = bytearray(data)
    changed[34 + 8] = 7  # the third sequence is shorter: two tokens are in no sequence
    path.write_bytes(changed)
    IndexedDataset(prefix).check()
    assert "4 bytes" in capsys.readouterr().out


def test_replacing_a_pair_removes_no_checksum_unseen(prefix):
    """A pair of another program under the same name is refused until it gets checksums."""
    with PairWriter(prefix, np.uint16) as builder:
        builder.add_document(np.arange(40), [40])
    with pytest.raises(ValueError, match="--write-checksums"):
        IndexedDataset(prefix).check()
    write_sums(prefix)
    IndexedDataset(prefix).check()
