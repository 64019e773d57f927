"""Logits with the cache, and greedy tokens, against transformers' GPT-2 and Llama with the same
weights, from checkpoints of several layouts."""

from __future__ import annotations

import pytest
import torch

from megatron.inference.cached_model import CachedModel
from megatron.inference.engine import Engine, Request
from megatron.inference.load_model import open_trained_model
from megatron.inference.sampling import Sampling
from tests.load_tool import load_tool
from tests.runs import train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

VOCAB = 89
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --save-interval 4 --eval-iters 0 --mock-data --vocab-size 89 --device cpu "
    "--num-workers 0 --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0"
).split()
MODELS = {
    "gpt2": [],
    "llama": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
        "--ffn-hidden-size 176"
    ).split(),
}
LAYOUTS = {
    1: [],
    4: "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split(),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [80, 3], [11] * 20]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """(our checkpoint, transformers' model of its export)."""
    name, ranks = request.param
    folder = tmp_path_factory.mktemp("generation")
    argv = [*COMMON, *MODELS[name], *LAYOUTS[ranks], "--save", str(folder / "run")]
    train(folder / "log", argv, world=ranks)
    words = ["hf-export", str(folder / "run"), str(folder / "hf")]
    assert load_tool("convert_checkpoint").main(words) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    return folder / "run", theirs.eval()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "pair",
    [(name, ranks) for name in MODELS for ranks in LAYOUTS],
    ids=[f"{name} from {ranks} ranks" for name in MODELS for ranks in LAYOUTS],
    indirect=True,
)
def test_logits_and_fifty_greedy_tokens_are_those_of_transformers(pair):
    run, theirs = pair
    cached = CachedModel(open_trained_model(str(run), device="cpu").model, len(PROMPTS), 100)
    logits = cached.forward(PROMPTS, [0] * len(PROMPTS))
    for row, prompt in zip(logits, PROMPTS, strict=True):
        with torch.no_grad():
            right = theirs(torch.tensor([prompt])).logits[0, -1, :VOCAB]
        assert float((row[:VOCAB] - right).abs().max()) < 1e-4
    engine = Engine(open_trained_model(str(run), device="cpu").model, len(PROMPTS))
    found = [[] for _ in PROMPTS]
    requests = [Request(prompt, 50, Sampling(temperature=0.0)) for prompt in PROMPTS]
    for number, _, token in engine.run(requests):
        found[number].append(token.id)
    for tokens, prompt in zip(found, PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            right = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=50,
                min_new_tokens=50,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        assert tokens == right[0, len(prompt) :].tolist()
