"""Profiles: which iterations and ranks, and that the events have our modules' names."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.addons.ops.profiling.feature import ProfilingConfig
from megatron.arguments import config_from
from megatron.features.registry import RunConfig
from megatron.training.feature import Loop, features_of
from megatron.training.hook import Hook
from tests.core.model.tiny import tiny_model, tokens
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

FLAGS = {
    "profile": True,
    "use_pytorch_profiler": True,
    "profile_step_start": 2,
    "profile_step_end": 4,
}


def profilers_at(folder, model, rank=0, **flags) -> list[Hook]:
    values = dict.fromkeys(("num_layers", "num_attention_heads"), 2) | {"hidden_size": 8}
    config = config_from(RunConfig, {**values, "save": str(folder), **FLAGS, **flags})
    runtime = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    run = SimpleNamespace(config=config, model=[model], runtime=runtime)
    [own] = [group for group in features_of(config) if isinstance(group, ProfilingConfig)]
    return list(own.hooks(Loop(run, None, None, 0.0, None)))


def traces(folder) -> dict[str, list[str]]:
    """The names of all events of each trace below a directory, by file."""
    found = {}
    for path in folder.rglob("*.pt.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name] = [event.get("name", "") for event in events]
    return found


def run_steps(profilers: list[Hook], model: torch.nn.Module, iterations: range) -> None:
    for iteration in iterations:
        for profiler in profilers:
            profiler.before_step(iteration)
        with torch.no_grad():
            ids, labels = tokens()
            model(ids, labels=labels)
        for profiler in profilers:
            profiler.after_step(SimpleNamespace(iteration=iteration))
    for profiler in profilers:
        profiler.on_end()


def test_two_iterations_are_recorded_under_the_names_of_modules(tmp_path):
    model = tiny_model()
    run_steps(profilers_at(tmp_path, model), model, range(1, 7))
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
    run_steps(profilers_at(tmp_path, model, rank, **flags), model, range(1, 7))
    assert traces(tmp_path) == {}


def test_a_run_that_ends_early_writes_what_it_has(tmp_path):
    model = tiny_model()
    run_steps(profilers_at(tmp_path, model), model, range(1, 4))
    [events] = traces(tmp_path).values()
    assert events.count("decoder.layers.0") == 1


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    model = tiny_model()
    (tmp_path / "profile").write_text("a file")
    run_steps(profilers_at(tmp_path, model), model, range(1, 7))
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


def test_profiles_are_among_the_events(tmp_path):
    board = tmp_path / "board"
    words = "--train-iters 4 --mock-data --profile --use-pytorch-profiler --profile-step-start 1"
    shown = ["--profile-step-end", "3", "--tensorboard-dir", str(board)]
    train(tmp_path / "run", [*SMALL, *words.split(), *shown])
    profiles = [path.name for path in board.rglob("*.pt.trace.json.gz")]
    assert profiles == ["rank0_iterations_2_3.pt.trace.json.gz"]
