"""Logits with a cache of keys and values against those of the whole text, over the options of the
model, lengths, and tensor-parallel ranks."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.inference.cached_model import CachedModel
from megatron.inference.static_step import StaticStep
from megatron.parallel.context import ParallelContext
from tests.core.model.tiny import MODELS, MOE, OPTIONS, VOCAB, tiny_model
from tests.forkrun import run_ranks
from tests.graph_on_cpu import graphs  # noqa: F401  # a fixture

TEXT = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(3)).tolist()


def differences(flags: dict, dtype: torch.dtype, ctx: ParallelContext | None = None) -> float:
    """The largest difference of logits, in parts of their size: a prompt read in two parts next to
    a longer one, then token by token."""
    whole = tiny_model(dtype, scramble=True, ctx=ctx, **flags)
    with torch.no_grad():
        expected = whole(torch.tensor([TEXT]))[0]
        other = whole(torch.tensor([TEXT[::-1]]))[0]
    cached = CachedModel(tiny_model(dtype, scramble=True, ctx=ctx, **flags), 3, 16)
    worst = 0.0

    def compare(logits: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal worst
        worst = max(worst, float((logits - right).abs().max() / expected.abs().max()))

    compare(cached.forward([TEXT[:3], TEXT[:2:-1]], [0, 0])[0], expected[2])
    cached.forward([TEXT[3:5]], [3])
    compare(cached.forward([TEXT[:8]], [0], 2)[0], expected[7])  # a row of its own
    compare(cached.forward([TEXT[5:8], TEXT[2:1:-1]], [5, 11])[0], expected[7])
    compare(cached.forward([[TEXT[8]], [TEXT[1]], [TEXT[8]]], [8, 12, 8])[2], expected[8])
    for i in range(9, 14):
        logits = cached.forward([[TEXT[i]], [TEXT[0]], [TEXT[i]]], [i, 13, i])
        compare(logits[0], expected[i])
        compare(logits[1], other[13])
        compare(logits[2], expected[i])
    cached.move(2, 1, 14)
    logits = cached.forward([[5], [5]], [14, 14])
    compare(logits[0], logits[1])
    return worst


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_those_of_the_whole_text(flags):
    assert differences(flags, torch.float64) < 1e-13


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_logits_in_fp32(flags):
    assert differences(flags, torch.float32) < 1e-6


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_fixed_shapes_give_the_same_logits(flags):
    """Rows of every length, in any number of positions that attention looks at."""
    models = [
        CachedModel(tiny_model(torch.float64, scramble=True, **flags), 4, 16) for _ in range(2)
    ]
    for model in models:
        model.forward([TEXT[:9], TEXT[3:4], TEXT[:5]], [0, 0, 0])
    tokens, positions = [5, 6, 7, 0], [9, 1, 5, 0]
    expected = models[0].forward([[token] for token in tokens], positions)
    for end in (10, 13, 16):
        step = StaticStep(models[1]._logits, 4, 16, torch.device("cpu"))
        step._inputs.copy_(torch.tensor([tokens, positions]))
        torch.testing.assert_close(step.region(4, end), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_recorded_steps_give_the_logits_of_the_whole_text(graphs, flags):  # noqa: F811
    assert differences(flags, torch.float64) < 1e-12
    assert [graph.replays for graph in graphs] == [4] or flags is MOE  # it may read the host


def _on_two_ranks(rank: int, world: int) -> float:
    ctx = ParallelContext(ParallelConfig(tensor_model_parallel_size=world), world, rank)
    return max(differences(flags, torch.float64, ctx) for flags in (*MODELS.values(), MOE))


def test_logits_of_tensor_parallel_ranks():
    assert max(run_ranks(2, _on_two_ranks)) < 1e-13


def test_no_more_than_the_window_is_kept():
    flags = {"window_size": (3, 0), "window_attn_skip_freq": "[1,0,1]"}
    cached = CachedModel(tiny_model(**MODELS["llama"], **flags), 2, 16)
    cached.forward([TEXT, TEXT[:4]], [0, 0])
    layers = cached.model.decoder.layers.values()
    kept = [layer.self_attention.cache._tensors["keys"].shape[:2] for layer in layers]
    assert kept == [(2, 4), (2, 16), (2, 4)]


def test_logits_are_computed_of_the_last_position_only():
    cached = CachedModel(tiny_model(), 2, 16)
    shapes = []
    cached.model.output_layer.register_forward_hook(lambda *parts: shapes.append(parts[2].shape))
    assert cached.forward([TEXT, TEXT[:4]], [0, 0]).shape == (2, VOCAB)
    assert shapes == [(1, 2, 64)]


def test_memory_that_was_not_written_yet_is_not_seen():
    """A batch of unequal lengths masks positions that no token has filled."""
    cached = CachedModel(tiny_model(), 2, 16)
    cached.forward([TEXT, TEXT[:2]], [0, 0])
    expected = cached.forward([[1], [1]], [14, 2])
    for _ in range(20):
        garbage = [torch.full((3, 2, 16, 4, 8), float("nan")) for _ in range(4)]
        del garbage
        other = CachedModel(tiny_model(), 2, 16)
        other.forward([TEXT], [0])
        other.forward([TEXT[:2]], [0], 1)
        assert torch.allclose(other.forward([[1], [1]], [14, 2]), expected, atol=1e-5)
