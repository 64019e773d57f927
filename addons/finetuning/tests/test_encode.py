"""Conversations to ids and mask with each kind of tokenizer that has no offsets of its own."""

import numpy as np
import pytest

from megatron.addons.finetuning.encode import ChatEncoder, template_for
from megatron.addons.finetuning.loss_mask import is_trained, labels_of, mark, tokens_of
from megatron.addons.finetuning.tests.conversations import CONVERSATIONS, EXPECTED
from megatron.data.tokenizers.build import Tokenizer, build_tokenizer
from tests.core.data.vocabularies import write_bpe, write_sentencepiece, write_tiktoken


def gpt2(folder) -> Tokenizer:
    vocab, merges = write_bpe(folder)
    return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def llama2(folder) -> Tokenizer:
    return build_tokenizer("Llama2Tokenizer", tokenizer_model=write_sentencepiece(folder))


def tik(folder) -> Tokenizer:
    return build_tokenizer(
        "TikTokenizer",
        tokenizer_model=write_tiktoken(folder / "t.json"),
        vocab_size=300,
        tiktoken_num_special_tokens=44,
    )


@pytest.mark.parametrize("make", [gpt2, llama2, tik])
def test_the_parts_of_the_text_are_encoded_apart(make, tmp_path):
    tokenizer = make(tmp_path)
    encoder = ChatEncoder(tokenizer, template_for(tokenizer, "zephyr", None))
    end = tokenizer.eos
    assert encoder.end_of_turn_id == end
    for messages, expected in zip(CONVERSATIONS.values(), EXPECTED["zephyr"], strict=True):
        ids, trained = encoder.encode(messages)
        expected_ids: list[int] = []
        expected_mask: list[bool] = []
        for number, part in enumerate(expected.replace("»", "«").split("«")):
            for place, text in enumerate(part.split("</s>")):
                found = [end] * (place > 0)
                if text and isinstance(tokenizer.bos, int) and make is llama2:
                    found += list(tokenizer.encode(text))[1:]  # without <s>
                elif text:
                    found += list(tokenizer.encode(text))
                expected_ids += found
                expected_mask += [number % 2 == 1] * len(found)
        assert ids.tolist() == expected_ids and trained.tolist() == expected_mask
        answers = [message for message in messages if message["role"] == "assistant"]
        assert (ids[trained] == end).sum() == len(answers)
        assert encoder.prompt(messages[:1])[: len(ids[:3])] == ids[:3].tolist()


def test_stored_values_give_back_ids_and_mask():
    random = np.random.default_rng(3)
    ids = random.integers(0, 4, 500)
    trained = random.random(500) < 0.5
    stored = mark(ids, trained).astype(np.int64)
    assert (tokens_of(stored) == ids).all()
    counted = is_trained(stored)
    assert (counted == trained).all()
    labels = labels_of(stored)
    assert ((labels != 0) == trained).all()
    assert (np.maximum(labels, 0)[trained] == ids[trained]).all()
