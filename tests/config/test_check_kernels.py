"""Choices between kernels that no machine can meet, and those that say nothing."""

from __future__ import annotations

import pytest

from megatron.arguments import config_from, parse
from megatron.config.check import notes, problems
from megatron.config.command_line import parser
from megatron.config.tree import Config

PARSER = parser()
GOOD = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --min-lr 0")


def checked(flags: str, world: int = 1) -> tuple[list[str], list[str]]:
    """(problems, notes) of a command line."""
    parsed = parse(PARSER, f"{GOOD} {flags}".split())
    assert not parsed.problems, parsed.problems
    config = config_from(Config, parsed.typed)
    return problems(config, world, parsed.typed), notes(config, world, parsed.typed)


ENGINE, FUSED = "--transformer-impl transformer_engine", "--attention-backend fused"
FLASH = "--use-flash-attn --attention-dropout 0 --bf16"


@pytest.mark.parametrize(("flags", "problem"), [
    (f"--use-flash-attn {FUSED}", "--use-flash-attn and --attention-backend fused: two kinds of attention"),
    ("--no-masked-softmax-fusion --attention-backend local",
     "--no-masked-softmax-fusion and --attention-backend local: two kinds of attention"),
    ("--attention-backend flash --bf16", "--attention-backend flash: would drop by a generator of its own, whose masks"),
    (FUSED, "--attention-backend fused: would drop by a generator of its own, whose masks"),
    ("--use-flash-attn --attention-dropout 0", "--use-flash-attn: computes in fp16 and bf16 only; add --bf16"),
    (f"{FLASH} --device cpu", "--use-flash-attn: needs a CUDA device, and --device is cpu"),
    (f"{FLASH} --kv-channels 264", "--use-flash-attn: heads of 264 channels, and it has at most 256"),
    (f"{FUSED} --attention-dropout 0 --fp64", "--attention-backend fused: has no fp64; use auto"),
    (f"{FUSED} --attention-dropout 0 --reset-attention-mask", "--attention-backend fused: torch's has no masks by document"),
    (f"{ENGINE} --fp64", f"{ENGINE}: it has no fp64; leave it or --fp64 out"),
    (f"{ENGINE} --torch-compile", f"{ENGINE}: its modules are not traced; leave it or --torch-compile out"),
    (f"{ENGINE} --bf16 --fp32-residual-connection", f"{ENGINE}: its norms read the weights' format"),
    (f"{ENGINE} --bf16 --fp8-format hybrid --recompute-fraction 1", f"{ENGINE}: its delayed scales would be others when"),
    (f"{ENGINE} --device cpu", f"{ENGINE}: needs a CUDA device, and --device is cpu"),
])  # fmt: skip
def test_what_no_machine_can_do(flags, problem):
    found = checked(flags)[0]
    assert len(found) == 1 and found[0].startswith(problem), found


@pytest.mark.parametrize("flag", ["--attention-backend local", "--attention-backend unfused", "--no-masked-softmax-fusion"])
def test_context_parallel_attention_has_kernels_of_its_own(flag):
    found = checked(f"{flag} --context-parallel-size 2 --position-embedding-type rope", world=2)[0]
    assert [line.partition(":")[0] for line in found] == [flag], found


@pytest.mark.parametrize("flags", [
    "", "--attention-backend local", "--attention-backend unfused --no-masked-softmax-fusion", "--no-masked-softmax-fusion",
    "--attention-backend fused --attention-dropout 0", "--use-flash-attn --attention-dropout 0 --bf16",
    "--transformer-impl transformer_engine --bf16", "--swiglu --no-bias-swiglu-fusion", "--no-gradient-accumulation-fusion",
    "--position-embedding-type rope --no-rope-fusion"])  # fmt: skip
def test_what_some_machine_can_do(flags):
    assert checked(flags) == ([], [])


@pytest.mark.parametrize(("flags", "note"), [
    ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion: no effect without --swiglu"),
    ("--no-rope-fusion", "--no-rope-fusion: no effect without --position-embedding-type rope"),
    ("--no-masked-softmax-fusion --attention-backend fused --attention-dropout 0",
     "--no-masked-softmax-fusion: no effect without --attention-backend auto or unfused"),
    ("--transformer-impl transformer_engine --bf16 --fp8-format e4m3",
     "--fp8-recipe delayed: Transformer Engine keeps its history of maxima to itself, so a resumed run begins it anew and "
     "is not the same bit for bit; with --fp8-recipe tensorwise it is")])  # fmt: skip
def test_what_changes_nothing_is_said(flags, note):
    assert checked(flags) == ([], [note])
