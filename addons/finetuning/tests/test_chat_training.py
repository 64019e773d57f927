"""Chat data from the file to the loss: only the assistant's tokens count, by a computation of its
own from the messages."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.addons.finetuning.tests.packed_files import build
from megatron.data.megatron_order import open_corpus
from megatron.data.tokenizers.build import ByteTokenizer
from megatron.inference.load_model import open_trained_model
from megatron.training.batch import BatchRules, MicroBatch, make_batch
from tests import problems
from tests.core.model.tiny import tiny_model
from tests.load_tool import exit_code, load_tool
from tests.runs import NO_DROPOUT, SMALL, plot, train, with_flags

END = ByteTokenizer.eod
# A NUL in an answer is id 0 of ByteTokenizer, as "!" is of GPT-2's vocabulary.
CHATS = [
    [("user", "Hi"), ("assistant", "Hello\0!"), ("user", "2+2?"), ("assistant", "4")],
    [("system", "Be kind."), ("user", "Hello\0"), ("assistant", "\0é")],
    [("assistant", "Yes?"), ("user", "No.")],
    [("user", "a" * 30), ("assistant", "b" * 20)],
]


def write(folder: Path, chats: list[list[tuple[str, str]]]) -> str:
    """The prefix of the pair that tools/preprocess_data.py --chat makes of conversations."""
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]})
        for chat in chats
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    flags = "--tokenizer-type ByteTokenizer --chat --chat-template zephyr --workers 1".split()
    words = ["--input", folder / "chats.jsonl", "--output-prefix", folder / "x", *flags]
    assert exit_code(load_tool("preprocess_data").main, *words) == 0
    return str(folder / "x_chat_document")


def by_hand(chat: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Ids of a conversation in Zephyr's form, and the places of the trained ones."""
    ids: list[int] = []
    places: list[int] = []
    for role, text in chat:
        ids += f"<|{role}|>\n".encode()
        answer = [*text.encode(), END]
        if role == "assistant":
            places += range(len(ids), len(ids) + len(answer))
        ids += [*answer, ord("\n")]
    return ids, places


def losses_by_hand(model, chats: list[list[tuple[str, str]]]) -> list[float]:
    """The loss of every trained token, each conversation alone."""
    found: list[float] = []
    for ids, places in map(by_hand, chats):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0].double()
        found += [
            float(torch.logsumexp(logits[at - 1], 0) - logits[at - 1, ids[at]])
            for at in places
            if at
        ]
    return found


@pytest.mark.parametrize("mode", ["pad_samples", "pieces"])
def test_the_loss_is_that_of_the_assistants_tokens_alone(mode, tmp_path):
    prefix = write(tmp_path, CHATS)
    model = tiny_model(
        torch.float64,
        scramble=True,
        vocab=257,
        padded=264,
        seq_length=320,
        max_position_embeddings=320,
    )
    length = 100 if mode == "pad_samples" else sum(len(by_hand(chat)[0]) for chat in CHATS)
    more = {"pad_samples": True} if mode == "pad_samples" else {}
    data = build([prefix], seq=length, rows=1, batch=1, vocab=257, **more)[0]
    assert len(data) == (4 if mode == "pad_samples" else 1)
    total = tokens = 0.0
    for row in range(len(data)):
        batch = make_batch(
            MicroBatch(torch.from_numpy(data[row]).unsqueeze(0), packed=True),
            BatchRules(None),
            torch.device("cpu"),
        )
        loss, count, _ = plot().forward_step(batch, model)
        total += loss.item()
        tokens += count.item()
    expected = losses_by_hand(model, CHATS)
    # the NULs are trained as well
    assert tokens == len(expected) == 7 + 1 + 2 + 4 + 5 + 21
    assert total == pytest.approx(math.fsum(expected), rel=1e-12)


def test_a_run_logs_that_loss(tmp_path):
    prefix = write(tmp_path, CHATS)
    at = SMALL.index("--vocab-size")  # ByteTokenizer has its own
    words = with_flags(
        [*SMALL[:at], *SMALL[at + 2 :], *NO_DROPOUT],
        *"--tokenizer-type ByteTokenizer --seq-length 100 --max-position-embeddings 100".split(),
        *"--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --eval-iters 0".split(),
        *"--lr 1e-30 --lr-decay-style constant --lr-warmup-iters 0".split(),
        *f"--packed-samples --pad-samples --train-data-path {prefix}".split(),
        *f"--save {tmp_path / 'run'} --save-interval 1".split(),
    )
    run = train(tmp_path / "log", words)
    expected = losses_by_hand(open_trained_model(str(tmp_path / "run")).model, CHATS)
    assert run.rows[0]["lm_loss"] == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)


def test_without_packed_samples_the_data_is_refused_with_the_flag_to_add(tmp_path):
    prefix = write(tmp_path, CHATS)
    with problems.raises(ValueError, "token-id-out-of-range", prefix, "--packed-samples"):
        open_corpus(prefix, 257)
