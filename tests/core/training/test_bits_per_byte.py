"""Bits per byte of a validation, against a computation of its own from the saved model and the
text."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from megatron.data.tokenizers.build import ByteTokenizer
from megatron.data.tokenizers.metadata import description
from megatron.inference.load_model import open_trained_model
from tests.pairs import PairWriter
from tests.runs import train

SEQUENCE = 16
FLAGS = (
    f"--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length {SEQUENCE} --device "
    f"cpu --max-position-embeddings {SEQUENCE} --tokenizer-type ByteTokenizer --micro-batch-size "
    "1 --num-workers 0 --train-iters 3 --lr 1e-2 --eval-interval 100 --eval-iters 1 "
    "--full-validation --save-interval 3"
).split()


def write_pair(prefix: Path, text: str, **counts: int) -> list[int]:
    """One document of bytes with its end, and the .json that preprocessing writes; its tokens."""
    tokenizer = ByteTokenizer()
    tokens = [*tokenizer.tokenize(text), tokenizer.eod]
    with PairWriter(prefix, "uint16") as builder:
        builder.add_document(tokens, [len(tokens)])
    said = (
        {"tokens": len(tokens), "text_bytes": len(text.encode("utf-8"))} if not counts else counts
    )
    Path(f"{prefix}.json").write_text(
        json.dumps(description(tokenizer.identity(), tokenizer.vocab_size, said))
    )
    return tokens


@pytest.fixture(scope="module")
def text() -> str:
    return "".join(random.Random(1).choices("abcde é\n", k=300))


def evaluated(folder: Path, *words: object) -> list[dict]:
    """What the metrics file says of the validations of a short run."""
    train(folder, [str(word) for word in [*FLAGS, "--save", folder / "run", *words]])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "split" in line]


def test_it_is_the_cross_entropy_in_bits_over_the_bytes_of_the_text(tmp_path, text):
    tokens = write_pair(tmp_path / "x", text)
    [found] = evaluated(
        tmp_path, "--train-data-path", tmp_path / "x", "--valid-data-path", tmp_path / "x"
    )

    trained = open_trained_model(str(tmp_path / "run"), None, None, "cpu")
    nats = []
    for first in range(0, len(tokens) - SEQUENCE, SEQUENCE):
        window = torch.tensor(tokens[first : first + SEQUENCE + 1])
        with torch.no_grad():
            logits = trained.model(window[None, :-1])[0, :, :257].double()
        nats += (logits.logsumexp(-1) - logits.gather(-1, window[1:, None])[:, 0]).tolist()
    # of the whole document, its end included
    bits = sum(nats) / len(nats) / math.log(2) * len(tokens)
    assert found["bits_per_byte"] == pytest.approx(bits / len(text.encode("utf-8")), rel=1e-5)


def test_each_validation_set_has_its_own(tmp_path, text):
    """Where one pair does not say how many bytes it has (an older one), the other still shows its
    number."""
    write_pair(tmp_path / "x", text)
    write_pair(tmp_path / "old", text, tokens=331)
    both = [
        "--valid-data-path",
        tmp_path / "x",
        tmp_path / "old",
        "--train-data-path",
        tmp_path / "x",
    ]
    of_both = evaluated(tmp_path / "apart", *both, "--multiple-validation-sets")
    assert [line["bits_per_byte"] is None for line in of_both] == [False, True]
    [together] = evaluated(tmp_path / "together", *both)
    assert together["bits_per_byte"] is None and together["lm_loss"] > 0
