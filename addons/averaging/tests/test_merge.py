"""tools/merge_checkpoints.py: the weighted mean of checkpoints of one model."""

from math import cos, pi, sqrt
from pathlib import Path

import pytest
import torch

from megatron.arguments import config_from, to_args_text
from megatron.checkpoint import reading, store
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config.tree import Config
from megatron.inference.load_model import open_trained_model
from tests.core.model.tiny import tiny_config, tiny_model
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem

VOCAB = 61
COUNT = 4
FLAGS = dict(swiglu=True, add_bias_linear=False)
DECAYS = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + cos(pi * part)) / 2,
    "1-sqrt": lambda part: 1 - sqrt(part),
}
SHAPES = {name: tuple(p.shape) for name, p in tiny_model(padded=VOCAB, **FLAGS).named_parameters()}


def updates(seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Initial fp32 weights, and what is added to them from each checkpoint to the next."""
    random = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=random) * 0.1 for name, shape in SHAPES.items()}
        for _ in range(COUNT)
    ]


def checkpoint(root: Path, step: int, weights: dict[str, torch.Tensor], parts: int, **flags):
    """One of a bf16 run whose ranks have each of `parts` row blocks; more ranks pad more."""
    padded = VOCAB + 3 * parts
    slices = []
    for name, weight in weights.items():
        is_embedding = name == "embedding.word_embeddings.weight"
        extra = weight.new_full((padded - VOCAB, weight.shape[1]), step) if is_embedding else None
        full = weight if extra is None else torch.cat([weight, extra])
        for key, tensor in ((name, full.bfloat16()), (f"optimizer.fp32_param.{name}", full)):
            shape = tuple(tensor.shape)
            start = 0
            for block in tensor.chunk(parts):
                stop = start + len(block)
                box = ((start, stop), *((0, size) for size in shape[1:]))
                slices.append(TensorSlice(key, shape, tensor.dtype, box, block))
                start = stop
    more = dict(mock_data=True, vocab_size=VOCAB, make_vocab_size_divisible_by=padded, bf16=True)
    config = config_from(Config, vars(tiny_config(**FLAGS | flags)) | more)
    store.save(root, step, slices, RunState(iteration=step), to_args_text(config))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A folder, and the fp32 weights of checkpoints 2, 4, 6 and 8 of its run directories: whole,
    and parts with other layouts. wider is another model."""
    folder = tmp_path_factory.mktemp("runs")
    weights: list[dict[str, torch.Tensor]] = []
    for each in updates():
        before = weights[-1] if weights else {name: 0.0 for name in each}
        weights.append({name: before[name] + change for name, change in each.items()})
    for number, values in enumerate(weights):
        checkpoint(folder / "whole", 2 * number + 2, values, 1)
        checkpoint(folder / "parts", 2 * number + 2, values, 2 + number % 2)
    checkpoint(folder / "wider", 2, weights[0], 1, norm_epsilon=1e-3)
    return folder, weights


def merge(*words: object) -> int:
    return exit_code(load_tool("merge_checkpoints").main, *words)


def tensors(root: Path) -> dict[str, torch.Tensor]:
    with reading.load(root).reader() as reader:
        return {name: reader.read(name) for name in reader.names()}


@pytest.mark.parametrize("decay", DECAYS)
def test_steps_count_as_the_decay_says(decay, runs, tmp_path):
    """Whatever the layout; the padding of the vocabulary is not merged."""
    for layout in ("whole", "parts"):
        words = ("--save", tmp_path / f"of_{layout}", "--merge-weights", decay)
        assert merge(runs[0] / layout, *words) == 0
    merged, other = tensors(tmp_path / "of_whole"), tensors(tmp_path / "of_parts")
    assert merged.keys() == SHAPES.keys() == other.keys()
    each = updates()
    for name, found in merged.items():
        expected = sum(
            DECAYS[decay](number / COUNT) * update[name].double()
            for number, update in enumerate(each)
        )
        torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-6)
        assert torch.equal(found.view(torch.int16), other[name].view(torch.int16))
    assert open_trained_model(str(tmp_path / "of_whole"), device="cpu").model is not None


def test_of_exact_weights_in_any_share(runs, tmp_path):
    """Rounded once: of the optimizer's fp32 weights, not of those in bf16."""
    words = ("--merge-window", 3, "--merge-weights", 1, 2, 5, "--save", tmp_path / "out")
    assert merge(runs[0] / "parts", *words) == 0
    for name, found in tensors(tmp_path / "out").items():
        shares = zip((1, 2, 5), runs[1][1:], strict=True)
        expected = sum(share / 8 * weights[name].double() for share, weights in shares)
        assert torch.equal(found, expected.bfloat16())


REFUSED = {
    "one checkpoint": ("{}/whole/iter_0000004", "not-converted"),
    "a window that is too long": ("{}/whole --merge-window 5", "checkpoint-step-missing"),
    "fewer numbers": ("{}/whole --merge-weights 1 2", "value-malformed"),
    "no number": ("{}/whole --merge-weights steep", "value-malformed"),
    "no sum": ("{}/whole --merge-weights 1 -1 1 -1", "value-out-of-range"),
    "another model": ("{}/whole/iter_0000004 {}/wider/iter_0000002", "not-converted"),
    "no checkpoint": ("{}/whole {}/nothing", "checkpoint-missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, runs, tmp_path, capfd):
    words, code = REFUSED[case]
    assert merge(*words.replace("{}", str(runs[0])).split(), "--save", tmp_path / "out") in (1, 2)
    assert_problem(capfd.readouterr().err.splitlines()[-1], code)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(runs, capfd):
    folder, _ = runs
    assert merge(folder / "whole", "--save", folder / "parts") == 1
    assert_problem(capfd.readouterr().err.splitlines()[-1], "output-exists")
