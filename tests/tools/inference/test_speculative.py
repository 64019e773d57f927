"""Drafts of the heads are those of whole texts, and texts with drafts are those without."""

import random
from functools import cache, partial

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.inference.engine import Engine, Request
from megatron.inference.sampling import Sampling
from megatron.inference.speculative import SpeculativeModel
from megatron.model.blocks.module import LayerInputs
from megatron.model.blocks.mtp.module import Depths, rolled
from megatron.model.gpt import GPTModel
from megatron.parallel.context import ParallelContext
from tests import problems
from tests.core.model.tiny import MODELS, VOCAB, tiny_model
from tests.forkrun import run_ranks

LENGTH = 32
FLAGS = dict(
    MODELS["llama"],
    max_position_embeddings=LENGTH,
    seq_length=LENGTH,
    mtp_num_layers=2,
    untie_embeddings_and_output_weights=True,
)
EOD = VOCAB - 1
KINDS = {
    "rotary": {},
    "no positions": {"position_embedding_type": "none"},
    "experts": dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24),
    "latent attention": dict(
        multi_latent_attention=True,
        group_query_attention=False,
        num_query_groups=1,
        kv_lora_rank=12,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
    ),
}


def untrained(dtype: torch.dtype = torch.float64, **flags) -> GPTModel:
    return tiny_model(dtype, **{"scramble": True, **FLAGS, **flags})


def texts(engine: Engine, requests: list[Request]) -> list[list]:
    """The new tokens of each request, and why it ended."""
    told: list[list] = [[] for _ in requests]
    for number, generation, token in engine.run(requests):
        told[number] += [token.id] if token else []
        if generation.finish_reason:
            told[number].append(generation.finish_reason)
    return told


def random_requests(count: int, seed: int, longest: int = 40) -> list[Request]:
    """Of unlike lengths, some longer than the cache, greedy ones and others."""
    draw = random.Random(seed)
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=20, seed=seed),
        Sampling(temperature=0.0, repetition_penalty=1.3),
    ]
    return [
        Request(
            [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))],
            draw.randint(1, longest),
            samplings[draw.choice([0, 0, 1, 2])],
            (EOD,),
            draw.choice([None, 1]),
        )
        for _ in range(count)
    ]


def heads_of_whole_text(model: GPTModel, tokens: list[int], count: int) -> list[int]:
    """What the heads draft behind the first token after a text, without a cache."""
    s = len(tokens) - 1
    ids = torch.tensor([tokens])
    state = model.decoder(model.embedding(ids[:, :s]), LayerInputs(), s, None)
    rotary = model.mtp.rotary and model.mtp.rotary(s, None)
    for depth, layer in enumerate(model.mtp.layers[:count], 1):
        embed = partial(model.embedding, ids[:, depth : depth + s])
        state = layer(state, embed, LayerInputs(rotary))
        ids = torch.cat((ids, model.logits(state)[-1:, :, :VOCAB].argmax(-1)), 1)
    return ids[0, s + 1 :].tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [*("rotary",), *(pytest.param(k, marks=pytest.mark.campaign) for k in list(KINDS)[1:])]
)
def test_drafts_are_those_of_the_heads_without_a_cache(kind, monkeypatch):
    monkeypatch.setattr("megatron.inference.engine.PREFILL_TOKENS", 7)
    whole = untrained(**KINDS[kind])
    engine = Engine(untrained(**KINDS[kind]), 3, drafts=2)
    for prompt in ([1, 2, 3], [*range(18)], [5]):
        engine.add(Request(prompt, 9, Sampling(temperature=0.0)))
    compared = 0
    while engine.running:
        given = {id(generation) for generation, _ in engine.step()}
        for generation in engine._running:
            if id(generation) in given:
                expected = heads_of_whole_text(whole, generation.tokens, 2)
                assert generation.drafts == expected
                compared += 1
    assert compared >= 20


class Oracle:
    """Drafts that are right as far as `right` says: of a text that is known."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], right: random.Random):
        self.known = known
        self.right = right

    def __call__(self, sequences, row: int = 0) -> list[list[int]]:
        return [self._of(tokens) for tokens, _ in sequences]

    def _of(self, tokens: list[int]) -> list[int]:
        for prompt, text in self.known.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                after = [*text, 0, 0][len(tokens) - len(prompt) :][:2]
                return [(t + self.right.choice([0, 0, 1])) % VOCAB for t in after]
        return [0, 0]


def test_text_is_the_same_whatever_is_drafted(monkeypatch):
    requests = random_requests(12, 3, 15)
    plain = texts(Engine(untrained(), 3), requests)
    known = {tuple(r.prompt): text[:-1] for r, text in zip(requests, plain, strict=True)}
    monkeypatch.setattr(SpeculativeModel, "draft", Oracle(known, random.Random(1)))
    engine = Engine(untrained(), 3, drafts=2)
    assert texts(engine, requests) == plain
    assert engine.drafted[0] >= engine.drafted[1] > 20
    assert 0.4 < engine.accepted[0] / engine.drafted[0] < 0.9
    assert 0 < engine.accepted[1] < engine.accepted[0]


def test_every_draft_that_is_right_is_accepted(monkeypatch):
    request = Request([1, 2, 3], 13, Sampling(temperature=0.0))
    (plain,) = texts(Engine(untrained(), 1), [request])
    known = {(1, 2, 3): plain[:-1]}
    always = random.Random()
    always.choice = lambda values: 0
    monkeypatch.setattr(SpeculativeModel, "draft", Oracle(known, always))
    engine = Engine(untrained(), 2, drafts=2)
    engine.add(request)
    steps = [[token.id for _, token in engine.step()] for _ in range(5)]
    assert [len(step) for step in steps] == [1, 3, 3, 3, 3]
    assert sum(steps, []) == plain[:-1]
    # of the last step both drafts are followed by a token that ends the text
    assert engine.drafted == engine.accepted == [4, 4]


def test_drafts_that_are_wrong_are_counted(monkeypatch):
    (plain,) = texts(Engine(untrained(), 1), [Request([1, 2, 3], 9, Sampling(temperature=0.0))])

    def second_is_wrong(model, sequences, row=0):
        ((tokens, _),) = sequences
        right, other = [*plain, 0][len(tokens) - 3 :][:2]
        return [[right, (other + 1) % VOCAB]]

    monkeypatch.setattr(SpeculativeModel, "draft", second_is_wrong)
    engine = Engine(untrained(), 2, drafts=2)
    engine.add(Request([1, 2, 3], 9, Sampling(temperature=0.0)))
    steps = [[token.id for _, token in engine.step()] for _ in range(3)]
    assert [len(step) for step in steps] == [1, 2, 2]
    assert (engine.drafted, engine.accepted) == ([2, 2], [2, 0])


def test_a_request_that_the_caller_stops_gives_nothing_more(monkeypatch):
    requests = [Request([n, 2, 3], 13, Sampling(temperature=0.0)) for n in (1, 4)]
    plain = texts(Engine(untrained(), 2), requests)
    known = {(n, 2, 3): text[:-1] for n, text in zip((1, 4), plain, strict=True)}
    always = random.Random()
    always.choice = lambda values: 0
    monkeypatch.setattr(SpeculativeModel, "draft", Oracle(known, always))
    engine = Engine(untrained(), 2, drafts=2)
    first, second = map(engine.add, requests)
    told = {id(first): [], id(second): []}
    while engine.running:
        for generation, token in engine.step():
            told[id(generation)].append(token.id)
            if generation is first and len(told[id(first)]) == 3:
                engine.stop(first)
    assert told[id(first)] == plain[0][:3] and first.finish_reason == "stop"
    assert told[id(second)] == plain[1][:-1]


@cache
def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Those of a model that has learned a sequence with jumps, its heads too."""
    model = tiny_model(dtype, **FLAGS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(15):
        columns = [torch.randint(VOCAB, (16,), generator=generator)]
        for _ in range(LENGTH):
            jumps = torch.rand(16, generator=generator) < 0.1
            other = torch.randint(VOCAB, (16,), generator=generator)
            columns.append(torch.where(jumps, other, (3 * columns[-1] + 1) % VOCAB))
        rows = torch.stack(columns, 1)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        depths = [(depth, 1 / tokens.numel()) for depth in rolled(tokens, labels, None, None, 2)]
        optimizer.zero_grad()
        model(tokens, labels=labels, depths=Depths(depths)).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "drafts, dtype",
    [
        (1, torch.float32),
        (2, torch.float64),
        pytest.param(1, torch.float64, marks=pytest.mark.sweep),
        pytest.param(2, torch.float32, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_a_hundred_prompts(drafts, dtype, capsys):
    def trained() -> GPTModel:
        model = tiny_model(dtype, **FLAGS)
        model.load_state_dict(weights(dtype))
        return model.eval()

    requests = random_requests(100, 5)
    engine = Engine(trained(), 4, drafts=drafts)
    assert texts(engine, requests) == texts(Engine(trained(), 4), requests)
    shares = [yes / of for yes, of in zip(engine.accepted, engine.drafted, strict=True)]
    with capsys.disabled():
        print(f"\n{engine.acceptance}")
    assert min(shares) > 0.5


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_other_models(kind):
    requests = random_requests(20, 7)
    flags = KINDS[kind]
    plain = texts(Engine(untrained(**flags), 4), requests)
    assert texts(Engine(untrained(**flags), 4, drafts=2), requests) == plain


def _on_two_ranks(rank: int, world: int) -> tuple[list[list], list[int]]:
    ctx = ParallelContext(ParallelConfig(tensor_model_parallel_size=world), world, rank)
    engine = Engine(untrained(scramble=False, ctx=ctx), 4, drafts=2)
    return texts(engine, random_requests(10, 9)), engine.accepted


@pytest.mark.campaign
def test_tensor_parallel_ranks_draft_alike():
    alone = Engine(untrained(scramble=False), 4, drafts=2)
    expected = texts(alone, random_requests(10, 9)), alone.accepted
    assert run_ranks(2, _on_two_ranks) == [expected] * 2


@pytest.mark.parametrize(
    "flags", [dict(mtp_num_layers=None), dict(mtp_num_layers=1), dict(window_size=(3, 0))]
)
def test_models_that_cannot_draft_are_refused(flags):
    with problems.raises(ValueError, "speculative-unfit", "--num-speculative-tokens 2"):
        Engine(untrained(**flags), 1, drafts=2)
