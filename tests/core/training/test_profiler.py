"""Profiles: which iterations and ranks, and that the events have our modules' names."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.training.profiler import Profiling
from tests.core.model.tiny import tiny_model, tokens
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

CPU = torch.device("cpu")
FLAGS = {
    "profile": True,
    "use_pytorch_profiler": True,
    "profile_step_start": 2,
    "profile_step_end": 4,
}


def config_at(folder, **flags) -> Config:
    values = dict.fromkeys(("num_layers", "num_attention_heads"), 2) | {"hidden_size": 8}
    return config_from(Config, {**values, "save": str(folder), **FLAGS, **flags})


def traces(folder) -> dict[str, list[str]]:
    """The names of all events of each trace below a directory, by file."""
    found = {}
    for path in folder.rglob("*.pt.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name] = [event.get("name", "") for event in events]
    return found


def run_steps(profiler: Profiling, model: torch.nn.Module, iterations: range) -> None:
    for iteration in iterations:
        profiler.before_step(iteration)
        with torch.no_grad():
            ids, labels = tokens()
            model(ids, labels=labels)
        profiler.after_step(SimpleNamespace(iteration=iteration))
    profiler.on_end()


def test_two_iterations_are_recorded_under_the_names_of_modules(tmp_path):
    model = tiny_model()
    run_steps(Profiling(config_at(tmp_path), [model], 0, CPU), model, range(1, 7))
    [(name, events)] = traces(tmp_path / "profile").items()
    assert name == "rank0_iterations_3_4.pt.trace.json.gz"
    for module, _ in model.named_modules():
        assert events.count(module or type(model).__name__) in (0, 2), module
    for module in ("decoder.layers.0.self_attention", "decoder.layers.0.mlp.linear_fc1"):
        assert events.count(module) == 2
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("flags", "rank"), [({"profile_ranks": (1,)}, 0), ({"profile": False}, 0), ({}, 1)]
)
def test_other_ranks_record_nothing(flags, rank, tmp_path):
    model = tiny_model()
    run_steps(Profiling(config_at(tmp_path, **flags), [model], rank, CPU), model, range(1, 7))
    assert traces(tmp_path) == {}


def test_a_run_that_ends_early_writes_what_it_has(tmp_path):
    model = tiny_model()
    run_steps(Profiling(config_at(tmp_path), [model], 0, CPU), model, range(1, 4))
    [events] = traces(tmp_path).values()
    assert events.count("decoder.layers.0") == 1


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    model = tiny_model()
    (tmp_path / "profile").write_text("a file")
    run_steps(Profiling(config_at(tmp_path), [model], 0, CPU), model, range(1, 7))
    assert "--profile" in capsys.readouterr().out


def test_of_a_run_the_chosen_rank_is_profiled_and_the_losses_stay(tmp_path):
    flags = "--train-iters 5 --mock-data --profile --use-pytorch-profiler --profile-ranks 1"
    steps = "--profile-step-start 1 --profile-step-end 3"
    words = [*with_flags(SMALL), *NO_DROPOUT, *flags.split()]
    save = tmp_path / "a" / "save"
    profiled = train(tmp_path / "a", [*words, *steps.split(), "--save", str(save)], world=2)
    assert list(traces(save)) == ["rank1_iterations_2_3.pt.trace.json.gz"]
    [events] = traces(save).values()
    assert events.count("decoder.layers.0.self_attention.linear_qkv") == 4  # 2 micro-batches each
    plain = train(tmp_path / "b", words, world=2)  # ends before iteration 11
    assert profiled.series("lm_loss", "grad_norm") == plain.series("lm_loss", "grad_norm")
    assert traces(tmp_path / "b") == {}
