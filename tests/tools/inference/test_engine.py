"""Requests decoded together: the same tokens as alone, joining and leaving, windows, stops."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from megatron import cuda
from megatron.inference import engine as engine_module
from megatron.inference.engine import Engine, Generation, Request
from megatron.inference.sampling import Sampling
from megatron.inference.text import TextStream
from tests.core.model.tiny import MODELS, VOCAB, tiny_model
from tests.graph_on_cpu import graphs  # noqa: F401  # a fixture

GREEDY = Sampling(temperature=0.0)
FLAGS = {**MODELS["llama"], "max_position_embeddings": 32, "seq_length": 32}


def engine(rows: int = 4, length: int | None = None, **flags) -> Engine:
    return Engine(tiny_model(torch.float64, scramble=True, **{**FLAGS, **flags}), rows, length)


def tokens_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """The new tokens of each request."""
    found = [[] for _ in requests]
    for number, _, token in engine.run(requests):
        found[number] += [token.id] if token else []
    return found


def alone(request: Request, **flags) -> list[int]:
    return tokens_of(engine(1, **flags), [request])[0]


def test_each_new_token_is_the_choice_after_all_before_it():
    model = tiny_model(torch.float64, scramble=True, **FLAGS)
    tokens = [1, 2, 3]
    with torch.no_grad():
        for new in alone(Request([1, 2, 3], 6, GREEDY)):
            assert new == int(model(torch.tensor([tokens]))[0, -1].argmax())
            tokens.append(new)
    assert len(tokens) == 9


def test_a_prompt_longer_than_the_cache_is_read_from_its_end():
    prompt = [i % VOCAB for i in range(50)]
    assert alone(Request(prompt, 3, GREEDY)) == alone(Request(prompt[-30:], 3, GREEDY))
    assert alone(Request(prompt, 1, GREEDY)) == alone(Request(prompt[-32:], 1, GREEDY))


@pytest.mark.parametrize("flags", [{}, {"position_embedding_type": "learned_absolute"}])
def test_a_text_longer_than_the_cache_goes_on_with_its_later_half(flags):
    text = alone(Request([1, 2, 3], 75, GREEDY), **flags)
    assert len(text) == 75
    model = tiny_model(torch.float64, scramble=True, **{**FLAGS, **flags})
    tokens = [1, 2, 3, *text]
    with torch.no_grad():
        first = model(torch.tensor([tokens[:32]]))[0, -1].argmax()
        assert text[29] == int(first)  # the last one that sees everything
        after = model(torch.tensor([tokens[33 - 16 : 33]]))[0, -1].argmax()
        assert text[30] == int(after)  # sees the later half


def test_log_probabilities_are_those_of_the_whole_text():
    model = tiny_model(torch.float64, scramble=True, **FLAGS)
    tokens = [1, 2, 3]
    for _, _, token in engine().run([Request([1, 2, 3], 5, Sampling(seed=2), logprobs=3)]):
        with torch.no_grad():
            right = model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
        assert token.logprob == pytest.approx(float(right[token.id]), abs=1e-12)
        best = right.topk(3)
        assert [id for id, _ in token.alternatives] == best.indices.tolist()
        assert [p for _, p in token.alternatives] == pytest.approx(best.values.tolist())
        tokens.append(token.id)
    assert len(tokens) == 8


def test_a_step_reads_a_limited_part_of_long_prompts_and_decodes_all_others(monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 4)
    one = engine(3)
    short = one.add(Request([1], 20, GREEDY))
    long = one.add(Request(list(range(18)), 3, GREEDY))
    steps = [{id(which) for which, _ in one.step()} for _ in range(6)]
    assert all(id(short) in step for step in steps)
    first = next(i for i, step in enumerate(steps) if id(long) in step)
    assert first == 4


@dataclass
class Job:
    """A request as a server has it. `leaves`: the client is gone after so many tokens."""

    request: Request
    stop: tuple[str, ...] = ()
    arrives: int = 0
    leaves: int = 1000
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None


def letters(ids) -> str:
    return "".join(chr(ord("0") + i) for i in ids)


def serve(engine: Engine, jobs: Sequence[Job]) -> None:
    """Every job from its arrival to its end, in steps of the engine."""
    waiting = list(jobs)
    running: dict[Generation, tuple[Job, TextStream]] = {}
    step = 0
    while waiting or running:
        for job in [job for job in waiting if job.arrives <= step]:
            if len(running) < engine.rows:
                waiting.remove(job)
                stream = TextStream(job.request.prompt, letters, job.stop)
                running[engine.add(job.request)] = job, stream
        for generation, (job, _) in list(running.items()):
            if len(job.tokens) >= job.leaves:
                engine.stop(generation)
                del running[generation]
        for generation, token in engine.step():
            job, stream = running[generation]
            if token:
                job.tokens.append(token.id)
                job.logprobs.append(token.logprob)
                job.text += stream.push(token.id)
            if stream.stopped:
                engine.stop(generation)
            if generation.finish_reason:
                job.text += stream.finish()
                job.reason = generation.finish_reason
                del running[generation]
        assert engine.running == len(running)
        step += 1


EOD = VOCAB - 1
KINDS = {
    "dense": {},
    "experts": dict(
        num_experts=6,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_expert_capacity_factor=0.5,
        moe_input_jitter_eps=0.5,
        moe_router_load_balancing_type=("sinkhorn",),
    ),
}


def random_job(draw: random.Random, alone: Engine) -> tuple[Job, Job]:
    """A job, and the same already served by itself."""
    length = draw.choice([0, 1, 2, draw.randint(3, 40)])
    prompt = [draw.randrange(VOCAB) for _ in range(length)] or [EOD]
    sampling = draw.choice([GREEDY, Sampling(1.0, 0.9, draw.randrange(99), 0, 1.1)])
    whole = Job(Request(prompt, draw.randint(1, 9), sampling, logprobs=0))
    serve(alone, [whole])
    end = draw.choice([0, 0, draw.randrange(len(whole.tokens))])
    ids, strings = draw.choice(
        [
            ((), ()),
            ((whole.tokens[end],), ()),
            ((whole.tokens[end],), ()),
            ((), (letters(whole.tokens[end : end + draw.randint(1, 2)]), "never")),
        ]
    )
    job = Job(
        replace(whole.request, stop_ids=ids),
        strings,
        arrives=draw.choice([0, 0, draw.randint(1, 8)]),
        leaves=draw.choice([1000, 1000, 1000, draw.randint(0, len(whole.tokens))]),
    )
    one = replace(job, arrives=0, tokens=[], logprobs=[])
    serve(alone, [one])
    return job, one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 6))]
)
def test_random_requests_get_together_what_they_get_alone(monkeypatch, kind, seed):
    """Whatever arrives, stops and leaves in between: prompts of one token, of none (then the end
    of a document) and longer than the cache, stop tokens, stop strings, clients that leave."""
    draw = random.Random(seed)
    alone = engine(1, **KINDS[kind])
    jobs, expected = zip(
        *(random_job(draw, alone) for _ in range(draw.randint(5, 10))), strict=True
    )
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", draw.choice([512, 512, 5]))
    serve(engine(draw.randint(3, 6), **KINDS[kind]), jobs)
    for job, one in zip(jobs, expected, strict=True):
        assert (job.tokens, job.text, job.reason) == (one.tokens, one.text, one.reason)
        assert job.logprobs == pytest.approx(one.logprobs, abs=1e-10)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 4))]
)
def test_requests_that_come_and_go_get_what_they_get_alone(graphs, monkeypatch, seed):  # noqa: F811
    """Some are still read while others, in rows before and behind them, are decoded."""
    draw = random.Random(seed)
    monkeypatch.setattr(cuda, "has_graphs", lambda device: False)
    alone = engine(1)
    pairs = [random_job(draw, alone) for _ in range(24)]
    monkeypatch.setattr(cuda, "has_graphs", lambda device: True)
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 5)
    serve(engine(6), [job for job, _ in pairs])
    assert [job.tokens for job, _ in pairs] == [one.tokens for _, one in pairs]
    assert any(graph.replays for graph in graphs)
