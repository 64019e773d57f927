"""Whole command lines as launch scripts have them: accepted as they stand, or refused with every
flag that would train another model; and the sizes of well-known models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.config import command_line
from megatron.config.plan import report
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.features.registry import RunConfig
from tests.problems import code_of

FLAGGED = (
    *("megatron-flag-not-supported", "value-not-a-choice", "parallelism-not-supported"),
    "cuda-graph-cannot-hold",
)


class Recipe(NamedTuple):
    """A command line on `ranks` ranks; `refused` are the flags that keep it from running."""

    name: str
    ranks: int
    refused: list[str]
    words: list[str]


def recipes() -> list[Recipe]:
    """The blocks of recipes.txt."""
    text = Path(__file__).with_name("recipes.txt").read_text(encoding="utf-8")
    bases: dict[str, list[str]] = {}
    found = []
    for block in text.split("\n\n")[1:]:
        head, _, body = block.strip().partition("\n")
        words = [w for word in shlex.split(body) for w in bases.get(word, [word])]
        if head.startswith("base "):
            bases["+" + head.split()[1]] = words
            continue
        name, ranks, verdict = head.split(" | ")
        refused = [] if verdict == "accepted" else verdict.split()
        found.append(Recipe(name, int(ranks), refused, words))
    return found


RECIPES = recipes()


def plan_of(words: list[str], ranks: int):
    """The plan of a command line that is accepted."""
    line = command_line.read([*words, "--dry-run", "--world-size", str(ranks)], {}, tree=RunConfig)
    return make_plan(line.config, ranks, planned_vocabulary(line.config.data)[0])


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_a_recipe_is_accepted_or_every_flag_that_stops_it_is_named(recipe, capsys):
    if not recipe.refused:
        assert plan_of(recipe.words, recipe.ranks).world_size == recipe.ranks
        return
    with pytest.raises(SystemExit) as left:
        plan_of(recipe.words, recipe.ranks)
    lines = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert left.value.code == 2 and {code_of(line) for line in lines} <= set(FLAGGED)
    assert {line.split()[0].rstrip(":") for line in lines} == set(recipe.refused)


def test_most_of_the_recipes_are_accepted():
    assert len(RECIPES) == 34 and sum(not recipe.refused for recipe in RECIPES) == 33


LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention"
)
UNTIED = " --untie-embeddings-and-output-weights"
FP8 = f"{LLAMA}{UNTIED} --kv-channels 128 --apply-layernorm-1p --bf16 --fp8-format hybrid"
QWEN2 = f"{LLAMA} --add-qkv-bias"
QWEN3 = f"{LLAMA} --qk-layernorm --kv-channels 128"


class Model(NamedTuple):
    """A published architecture: layers, width, MLP width, heads, key/value heads, ids of the
    padded vocabulary, other flags, and parameters counted by hand."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    flags: str
    parameters: int


MODELS = {
    "GPT-3 175B": Model(96, 12288, 49152, 96, 96, 51200, "", 174_615_846_912),
    "Llama 3 8B": Model(32, 4096, 14336, 32, 8, 128256, LLAMA + UNTIED, 8_030_261_248),
    "Llama 3 8B, FP8": Model(32, 4096, 14336, 32, 8, 128256, FP8, 8_030_261_248),
    "Llama 3 70B": Model(80, 8192, 28672, 64, 8, 128256, LLAMA + UNTIED, 70_553_706_496),
    "Llama 3.2 3B": Model(28, 3072, 8192, 24, 8, 128256, LLAMA, 3_212_749_824),
    "Apertus script 8B": Model(32, 4096, 14336, 32, 8, 131072, LLAMA + UNTIED, 8_053_329_920),
    "Apertus script 70B": Model(80, 8192, 28672, 64, 8, 131072, LLAMA + UNTIED, 70_599_843_840),
    "Qwen2.5 0.5B": Model(24, 896, 4864, 14, 2, 151936, QWEN2, 494_032_768),
    "Qwen2.5 1.5B": Model(28, 1536, 8960, 12, 2, 151936, QWEN2, 1_543_714_304),
    "Qwen2.5 3B": Model(36, 2048, 11008, 16, 2, 151936, QWEN2, 3_085_938_688),
    "Qwen2.5 7B": Model(28, 3584, 18944, 28, 4, 152064, QWEN2 + UNTIED, 7_615_616_512),
    "Qwen2.5 14B": Model(48, 5120, 13824, 40, 8, 152064, QWEN2 + UNTIED, 14_770_033_664),
    "Qwen2.5 72B": Model(80, 8192, 29568, 64, 8, 152064, QWEN2 + UNTIED, 72_706_203_648),
    "Qwen2.5 32B": Model(64, 5120, 27648, 40, 8, 152064, QWEN2 + UNTIED, 32_763_876_352),
    "Qwen3 0.6B": Model(28, 1024, 3072, 16, 8, 151936, QWEN3, 596_049_920),
    "Qwen3 1.7B": Model(28, 2048, 6144, 16, 8, 151936, QWEN3, 1_720_574_976),
    "Qwen3 4B": Model(36, 2560, 9728, 32, 8, 151936, QWEN3, 4_022_468_096),
    "Qwen3 8B": Model(36, 4096, 12288, 32, 8, 151936, QWEN3 + UNTIED, 8_190_735_360),
    "Qwen3 14B": Model(40, 5120, 17408, 40, 8, 151936, QWEN3 + UNTIED, 14_768_307_200),
    "Qwen3 32B": Model(64, 5120, 25600, 64, 8, 151936, QWEN3 + UNTIED, 32_762_123_264),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_has_its_published_number_of_parameters(name):
    m = MODELS[name]
    words = (
        f"--num-layers {m.layers} --hidden-size {m.hidden} --ffn-hidden-size {m.ffn} "
        f"--num-attention-heads {m.heads} --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data --make-vocab-size-divisible-by 1 "
        f"--vocab-size {m.vocabulary} {m.flags}"
    ).split()
    if m.groups != m.heads:
        words += ["--num-query-groups", str(m.groups)]
    line = command_line.read([*words, "--dry-run", "--world-size", "1"], {}, tree=RunConfig)
    plan = make_plan(line.config, 1, planned_vocabulary(line.config.data)[0])
    assert report.entries(line.config, plan)["model"].startswith(f"{m.parameters:,} parameters")
