"""Engine: its steps are those of pretrain_gpt.py, its outputs those of a formula, its stream that of
the export; docs/engine.md has its words."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools

import pytest
import torch

from megatron.addons.convert.hf_files import HFFolder
from megatron.addons.engine.entropy import entropy_of
from megatron.addons.engine.offloading import Offloaded, memory_of
from megatron.parallel.context import Axis
from megatron.training import Engine, loop
from tests.forkrun import run_ranks
from tests.load_tool import load_tool
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

STEPS = 3
TP, PP, CP, EP = (
    f"--{name}-{kind}-size"
    for name, kind in (
        ("tensor", "model-parallel"),
        ("pipeline", "model-parallel"),
        ("context", "parallel"),
        ("expert", "model-parallel"),
    )
)
ZERO = "--use-distributed-optimizer"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--ffn-hidden-size 64 --fp64"
).split()
WORDS = with_flags([*SMALL, *NO_DROPOUT, *LLAMA], "--train-iters", str(STEPS))
WORDS = with_flags(WORDS, "--lr-warmup-iters", "0", "--log-interval", "1")
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1 --num-layers 4".split()
LAYOUTS = {
    "alone": (1, []),
    "tp2": (2, [TP, "2"]),
    "zero1": (2, [ZERO]),
    "pp2 cp2": (4, [PP, "2", CP, "2"]),
    "pp2 vpp2 tp2": (4, [PP, "2", TP, "2", "--sequence-parallel", *VIRTUAL]),
    "zero3": (2, [ZERO, "--data-parallel-sharding-strategy", "optim_grads_params"]),
    "ep2": (2, [EP, "2", "--num-experts", "4", "--moe-aux-loss-coeff", "0.01"]),
}


def layouts(larger: pytest.MarkDecorator, first: int = 0) -> pytest.MarkDecorator:
    """A test of all layouts from the `first` on: larger ones have a mark, the last two are rare."""
    marks = [[]] * 3 + [[larger]] * 2 + [[pytest.mark.sweep]] * 2
    rows = zip(LAYOUTS.items(), marks, strict=True)
    params = [pytest.param(*layout, id=name, marks=mark) for (name, layout), mark in rows]
    return pytest.mark.parametrize(("world", "flags"), params[first:])


def record_batches(path: str) -> None:
    """A hook of a run: what each rank reads of each iteration, to `path`.RANK."""
    rows: list[torch.Tensor] = []
    step = loop.train_step

    def train_step(run, forward_step, samples, *more):
        def seen():
            for micro_batch in samples:
                rows.append(micro_batch.rows)
                torch.save(rows, f"{path}.{run.runtime.rank}")
                yield micro_batch

        return step(run, forward_step, seen(), *more)

    loop.train_step = train_step


def quiet(call, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()):
        return call(*args, **kwargs)


def cross_entropy(log_probs, data):
    """The loss of pretrain_gpt.py."""
    mask = data["loss_mask"]
    return -(log_probs * mask).sum(), mask.sum()


def trained(rank: int, world: int, words: list[str], path: str, masked: bool) -> list[tuple]:
    """(loss, gradient norm, learning rate) of each step of an engine, with a run's batches."""
    with quiet(Engine, words) as engine:
        tokens = torch.load(f"{path}.{rank}", weights_only=True)
        results = []
        for rows in torch.cat(tokens).split(engine.rows):
            batch = {"tokens": rows}
            if masked:
                batch["loss_mask"] = torch.ones(len(rows), rows.shape[1] - 1)
            assert set(engine.forward_backward(batch, cross_entropy)) == {"loss"}
            result = engine.step()
            results.append((result.loss, result.grad_norm, result.learning_rate))
        assert engine.iteration == STEPS
    return results


@layouts(pytest.mark.sweep)
def test_steps_are_those_of_a_run(world, flags, tmp_path):
    """The same numbers, to the last digit, from the same batches."""
    words = with_flags(WORDS, *flags)
    path = str(tmp_path / "batches")
    hook = functools.partial(record_batches, path)
    done = train(tmp_path, [*words, "--mock-data"], world, hook=hook)
    expected = done.series("lm_loss", "grad_norm", "learning_rate")
    assert len({loss for loss, *_ in expected}) == STEPS
    for masked in (False, True):
        for found in run_ranks(world, trained, words, path, masked):
            for ours, theirs in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


# --- losses of one's own


def batch_of(rank: int, ranks: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """A rank's part of a global batch with advantages and a mask."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 211, (rows, 33), generator=generator)
    advantages = torch.randn(rows, 32, generator=generator)
    mask = (torch.rand(rows, 32, generator=generator) > 0.3).float()
    batch = {"tokens": tokens, "advantages": advantages, "loss_mask": mask}
    # micro-batches of two go to the data-parallel ranks in turn
    return {name: torch.cat(list(x.split(2))[rank::ranks]) for name, x in batch.items()}


def policy_loss(log_probs, data):
    """A policy gradient with an entropy bonus."""
    mask = data["loss_mask"]
    loss = -(data["advantages"] * log_probs + 0.1 * data["entropy"]) * mask
    return loss.sum(), mask.sum(), {"entropy": ((data["entropy"] * mask).sum(), mask.sum())}


def policy_steps(rank: int, world: int, words: list[str]) -> tuple:
    """What two steps say, and log-probabilities after them of the first 4 rows of the batch."""
    with quiet(Engine, words) as engine:
        ctx = engine.run.runtime.ctx
        batch = batch_of(ctx.dp.rank, ctx.dp.size)
        said = []
        for _ in range(2):
            metrics = engine.forward_backward(batch, policy_loss, entropy=True)
            said += [metrics["loss"], metrics["entropy"], engine.step().grad_norm]
        whole = batch_of(0, 1)
        outputs = engine.eval({"tokens": whole["tokens"][:4]}, entropy=True)
        return said, outputs["log_probs"], outputs["entropy"]


@layouts(pytest.mark.campaign, first=1)
def test_a_loss_of_ones_own_in_a_layout(world, flags):
    """Losses, metrics, gradients and outputs of one rank: tensors of the batch are cut as the
    sequence is, and entropy has the gradients of the split vocabulary."""
    words = with_flags(WORDS, *flags)
    model = ("--num-experts", "--num-layers", "--moe-aux-loss-coeff")
    kept = [pair for pair in itertools.pairwise(flags) if pair[0] in model]
    alone = with_flags(WORDS, *itertools.chain(*kept))
    ((said, log_probs, entropy),) = run_ranks(1, policy_steps, alone)
    assert log_probs.shape == entropy.shape == (4, 32) and len(set(said)) == 6
    for of_rank in run_ranks(world, policy_steps, words):
        assert of_rank[0] == pytest.approx(said, rel=1e-10)
        torch.testing.assert_close(of_rank[1], log_probs, rtol=0, atol=1e-10)
        torch.testing.assert_close(of_rank[2], entropy, rtol=0, atol=1e-10)


@pytest.fixture
def engine():
    """One of this process."""
    with quiet(Engine, WORDS) as made:
        yield made


def test_outputs_are_those_of_the_logits(engine):
    """By torch's own distribution, in float64; and they keep no gradients."""
    tokens = batch_of(0, 1)["tokens"][:2]
    outputs = engine.eval({"tokens": tokens}, entropy=True)
    with torch.no_grad():
        logits = engine.run.model[0](tokens[:, :-1])
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(
        outputs["log_probs"], expected.log_prob(tokens[:, 1:]), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(outputs["entropy"], expected.entropy(), rtol=0, atol=1e-12)
    assert not any(x.requires_grad for x in outputs.values())


def test_the_gradient_of_entropy():
    logits = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, dtype=torch.float64)
    found = entropy_of(logits, 13, Axis("tp"))
    (ours,) = torch.autograd.grad((found * weights).sum(), logits)
    expected = torch.distributions.Categorical(logits=logits[..., :13]).entropy()
    (theirs,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_another_loss_has_other_metrics(engine):
    engine.forward_backward(batch_of(0, 1), cross_entropy)
    engine.step()
    metrics = engine.forward_backward(batch_of(0, 1), policy_loss, entropy=True)
    assert metrics.keys() == {"loss", "entropy"} and 5 < metrics["entropy"] < 5.36


# --- weights and checkpoints


def streamed(rank: int, world: int, words: list[str]) -> dict[str, torch.Tensor]:
    """The stream after a step, which is saved."""
    with quiet(Engine, words) as engine:
        ctx = engine.run.runtime.ctx
        engine.forward_backward(batch_of(ctx.dp.rank, ctx.dp.size), cross_entropy)
        engine.step()
        found = dict(quiet(lambda: list(engine.weights())))
        quiet(engine.save)
        before = {name: tensor.clone() for name, tensor in found.items()}
        engine.forward_backward(batch_of(ctx.dp.rank, ctx.dp.size), cross_entropy)
        engine.step()
        assert all(torch.equal(before[name], found[name]) for name in found), "a view"
    return found


@layouts(pytest.mark.sweep)
def test_the_stream_has_the_tensors_of_the_export(world, flags, tmp_path):
    """Byte for byte, on every rank."""
    words = [*with_flags(WORDS, *flags), "--save", str(tmp_path / "run")]
    ranks = run_ranks(world, streamed, words)
    with contextlib.redirect_stdout(io.StringIO()):
        assert load_tool("convert_checkpoint").main(
            ["hf-export", str(tmp_path / "run"), str(tmp_path / "hf"), "--no-verify"]
        ) == 0  # fmt: skip
    with HFFolder(tmp_path / "hf") as folder:
        names = folder.headers().keys()
        for found in ranks:
            assert found.keys() == names
            for name, tensor in found.items():
                assert torch.equal(tensor.view(torch.uint8), folder.read(name).view(torch.uint8))


def test_a_saved_engine_goes_on_bit_for_bit(tmp_path):
    words = [*WORDS, "--save", str(tmp_path)]
    batch = batch_of(0, 1)

    def steps(engine: Engine, count: int) -> list[float | None]:
        norms = []
        for _ in range(count):
            engine.forward_backward(batch, cross_entropy)
            norms.append(engine.step().grad_norm)
        return norms

    with quiet(Engine, words) as engine:
        steps(engine, 1)
        assert quiet(engine.save) == str(tmp_path)
        engine.offload()
        for call in (engine.save, lambda: engine.eval(batch), engine.offload):
            with raises(ValueError, "engine-order", "reload"):
                call()
        engine.reload()
        expected = steps(engine, 2)
    with quiet(Engine, [*words, "--load", str(tmp_path)]) as engine:
        assert engine.iteration == 1 and steps(engine, 2) == expected
        quiet(engine.load)
        assert engine.iteration == 1 and steps(engine, 2) == expected


def test_offloaded_memory_comes_back(engine):
    """As on an accelerator, where all storages are emptied: every view is what it was."""
    batch = batch_of(0, 1)
    engine.forward_backward(batch, cross_entropy)
    engine.step()
    kept, free = memory_of(engine.run)
    before = [tensor.clone() for tensor in kept]
    offloaded = Offloaded(kept, free)
    assert sum(t.untyped_storage().nbytes() for t in [*kept, *free]) == 0
    offloaded.back()
    assert all(torch.equal(new, old) for new, old in zip(kept, before, strict=True))
    assert len(before) > 20
    expected = engine.forward_backward(batch, cross_entropy)["loss"]
    engine.step()
    assert expected < 5.4 and engine.iteration == 2


# --- what is wrong


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": None}, '"tokens"'),
        ({"tokens": torch.zeros(8, 32, dtype=torch.int64)}, "[8, 33]"),
        ({"tokens": torch.zeros(6, 33, dtype=torch.int64)}, "[8, 33]"),
        ({"tokens": torch.zeros(8, 33)}, "int64"),
        ({"tokens": torch.full((8, 33), 211)}, "210"),
        ({"advantages": torch.zeros(8, 33)}, "[8, 32]"),
        ({"entropy": torch.zeros(8, 32)}, '"entropy"'),
    ],
    ids=str,
)
def test_a_batch_of_another_form(change, named, engine):
    batch = {name: x for name, x in (batch_of(0, 1) | change).items() if x is not None}
    with raises(ValueError, "engine-batch", named):
        engine.forward_backward(batch, cross_entropy)


def test_calls_in_another_order(engine):
    with raises(ValueError, "engine-order", "forward_backward"):
        engine.step()
    engine.forward_backward(batch_of(0, 1), cross_entropy)
    for call in (lambda: engine.forward_backward(batch_of(0, 1), cross_entropy), engine.offload):
        with raises(ValueError, "engine-order", "step"):
            call()
    with raises(ValueError, "flag-missing", "--save"):
        engine.save()


@pytest.mark.parametrize("flags", ["--label-smoothing 0.1", "--z-loss-coeff 1e-4"])
def test_flags_that_an_engine_cannot_have(flags):
    with raises(ValueError, "engine-flag", flags.split()[0]):
        Engine([*WORDS, *flags.split()])


def test_flags_of_the_loop_are_named():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), Engine([*WORDS, "--exit-duration-in-mins", "5"]):
        pass
    lines = [
        set(text.replace(",", " ").replace(":", " ").split())
        for text in said.getvalue().splitlines()
    ]
    named = {"--eval-interval", "--log-interval", "--exit-duration-in-mins"}
    assert [words for words in lines if named <= words and "--lr" not in words]


def test_flags_by_name():
    from megatron.addons.engine.engine import words_of

    flags = {"num_layers": 2, "bf16": True, "swiglu": False, "save": None, "betas": (0.9, 0.95)}
    assert words_of(flags) == "--num-layers 2 --bf16 --betas 0.9 0.95".split()


# --- what the ends of documents mean


@pytest.mark.parametrize("kind", ["--reset-position-ids", "--eod-mask-loss"])
def test_a_mask_of_ones_changes_nothing(kind):
    """With a loss mask, positions and losses are still what the flags say."""
    words = [*WORDS, kind]
    with quiet(Engine, words) as engine:
        vocabulary = engine.run.plan.vocab_size
        tokens = torch.arange(engine.rows * 33).view(engine.rows, 33) * 7 % vocabulary
        tokens[:, 5::9] = engine.run.rules.eod
        found = []
        for more in ({}, {"loss_mask": torch.ones(engine.rows, 32)}):
            engine.forward_backward({"tokens": tokens, **more}, cross_entropy)
            result = engine.run.buffers.flat.double().norm().item()
            engine._gradients = None
            found.append(result)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
