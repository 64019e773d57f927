"""Command lines of public launch scripts, with small sizes: their iterations in the layout they name
have the losses of one process."""

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.runs import NO_DROPOUT, Finished, train, with_flags, write_text

HERE = (
    "--tokenizer-type NullTokenizer --vocab-size 211 --make-vocab-size-divisible-by 8 "
    "--split 90,10,0 --num-workers 0 --device cpu --distributed-backend gloo "
    "--transformer-impl local"
).split()
# relative, of losses and gradient norms
TOLERANCE = {"--fp64": 1e-10, "--bf16": 1e-2}


class Recipe(NamedTuple):
    """A command line: the `model` alone is what one process trains, `layout` is for `ranks`."""

    ranks: int
    model: list[str]
    layout: list[str]


def recipes() -> dict[str, Recipe]:
    """The blocks of recipes.txt by their names."""
    text = Path(__file__).with_name("recipes.txt").read_text(encoding="utf-8")
    bases: dict[str, list[str]] = {}
    found = {}
    for block in text.split("\n\n")[1:]:
        head, _, body = block.strip().partition("\n")
        words, _, layout = body.partition("\nin ")
        first, *more = shlex.split(words)
        words = with_flags(bases[first], *more) if first in bases else [first, *more]
        if head.startswith("base "):
            bases["+" + head.split()[1]] = words
            continue
        name, ranks = head.split(" | ")
        found[name] = Recipe(int(ranks), words, shlex.split(layout))
    return found


RECIPES = recipes()
# Those of CI; the others are in the sweep.
OFTEN = (
    "CI recipe, interleaved stages with everything overlapped",
    "Llama 3 8B in FP8",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def numbers(run: Finished) -> list[float]:
    """Losses and gradient norms of all iterations."""
    return [number for row in run.series("lm_loss", "grad_norm") for number in row]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in OFTEN else pytest.mark.sweep)
        for name in RECIPES
    ],
)
def test_a_small_recipe_has_the_losses_of_one_process(name, data, tmp_path):
    recipe = RECIPES[name]
    precision = "--bf16" if "--bf16" in recipe.model else "--fp64"
    words = with_flags(recipe.model, *HERE, *NO_DROPOUT, precision, "--data-path", data)
    one = train(tmp_path / "one", words)
    run = train(tmp_path / "run", [*words, *recipe.layout], recipe.ranks)
    assert [row["iteration"] for row in run.rows] == list(range(1, len(one.rows) + 1))
    assert len(one.rows) >= 5 and one.rows[-1]["lm_loss"] < one.rows[0]["lm_loss"]
    assert numbers(run) == pytest.approx(numbers(one), rel=TOLERANCE[precision])
