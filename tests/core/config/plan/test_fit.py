"""Whether a run fits: the verdict by size, flags that take less, the host's share."""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch

from megatron import device, host, launcher, log
from megatron.arguments import Problems, parse_typed
from megatron.config import command_line
from megatron.config.plan import fit
from megatron.config.plan.costs import activations
from megatron.config.plan.plan import make_plan
from megatron.config.script import NO_SCRIPT
from megatron.features.registry import RunConfig
from megatron.training import memory, preflight
from tests.problems import assert_problem, codes_of, raises
from tests.runs import plot

GIB = fit.GIB
LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --micro-batch-size 1 "
    "--global-batch-size 128 --lr 1e-4 --train-iters 4 --mock-data --bf16 "
    "--use-distributed-optimizer --device cuda"
)
LLAMA_8B_FP8 = f"{LLAMA_8B} --fp8-format hybrid --fp8-amax-history-len 1024"
GPT_154B = (
    "--num-layers 88 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--micro-batch-size 4 --global-batch-size 4096 --lr 1e-4 --train-iters 4 --mock-data"
)


def planned(flags: str, world: int):
    words = [*shlex.split(flags), "--dry-run", "--world-size", str(world)]
    line = command_line.read(words, {}, tree=RunConfig)
    vocab = line.config.data.vocab_size
    return line.config, make_plan(line.config, world, vocab)


def flags_named(text: str) -> set[str]:
    """The flags that a line names as a remedy."""
    return set(re.findall(r"--[a-z-]+", text.rpartition("less memory: ")[2]))


@pytest.mark.parametrize(
    "gib, fits, named", [(200, True, False), (112, True, True), (80, False, True)]
)
def test_a_verdict_of_llama_8b_in_fp8_on_8_devices(gib, fits, named):
    """108.75 GiB, as traced (addons/lab/tests/trace)."""
    config, plan = planned(LLAMA_8B_FP8, 8)
    assert fit.fullest(config, plan).total == pytest.approx(108.75 * GIB, rel=1e-3)
    answer, text = fit.verdict(config, plan, gib * GIB)
    assert answer is fits and bool(flags_named(text)) is named


def test_a_remedy_names_flags_that_are_not_given():
    """Each that stands with its value takes memory from the fullest rank."""
    given = flags_named(fit.remedy(planned(LLAMA_8B, 8)[0]))
    assert "--recompute-granularity" in given and "--use-distributed-optimizer" not in given
    flags = f"{GPT_154B} --tensor-model-parallel-size 2"
    before = fit.fullest(*planned(flags, 8)).total
    for more in (
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--micro-batch-size 1",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ):
        assert more.split()[0] in flags_named(fit.remedy(planned(flags, 8)[0]))
        assert fit.fullest(*planned(f"{flags} {more}", 8)).total < before


def test_shared_gradients_and_weights_are_proposed_and_take_memory():
    """Llama 3 8B on 8 devices: 8.03 billion parameters of 2 and 4 bytes, of which an eighth stays;
    gradients of two units at most."""
    strategy = "--data-parallel-sharding-strategy"
    config, plan = planned(f"{LLAMA_8B} {strategy} optim", 8)
    assert strategy in flags_named(fit.remedy(config))
    one, two, three = (
        fit.fullest(*planned(f"{LLAMA_8B} {strategy} {name} --overlap-grad-reduce", 8)).kinds
        for name in ("optim", "optim_grads", "optim_grads_params")
    )
    assert two["weights"] == one["weights"] == 2 * plan.num_parameters
    assert three["weights"] == pytest.approx(one["weights"] / 8, rel=1e-3)
    assert two["gradients"] == pytest.approx(one["gradients"] / 8, rel=1e-3)
    table = 128256 * 4096  # of the embedding, as of the output layer
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert two["whole units"] == 4 * (table + 4096 + layer)
    # as backward begins: the output layer with its gradients, and the last layer gathered ahead
    assert three["whole units"] == pytest.approx((2 + 4) * table + 2 * layer, rel=1e-3)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_transformer_engine_has_fp8_copies_of_each_micro_batch(stages, recompute):
    """Two bytes a weight from a forward to its backward; this suite's kernels have one pair for all
    micro-batches of a step."""
    layer = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)  # bytes of the pairs of a layer
    flags = f"{LLAMA_8B} --fp8-format hybrid --fp8-recipe tensorwise"
    flags += f" --pipeline-model-parallel-size {stages}"
    flags += (
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        * recompute
    )
    ours, library = (
        activations(*planned(f"{flags}{more}", 8), 0)
        for more in ("", " --transformer-impl transformer_engine")
    )
    assert ours.alive == library.alive == stages
    kept = 0 if recompute else stages
    assert library.stored - ours.stored == (kept - 1) * 32 // stages * layer
    assert library.recomputed - ours.recomputed == recompute * layer


@pytest.mark.parametrize("gib, code, codes", [("200", 0, []), ("80", 2, ["not-enough-memory"])])
def test_a_dry_run_gives_the_verdict(capsys, gib, code, codes):
    argv = [*shlex.split(LLAMA_8B_FP8), *f"--dry-run --world-size 8 --device-memory {gib}".split()]
    try:
        plot().main(argv)
        assert not code
    except SystemExit as end:
        assert end.code == code
    out, err = capsys.readouterr()
    assert codes_of(err.splitlines()) == codes and ("memory: fits" in out) is not bool(code)


@pytest.mark.parametrize(
    "ranks, total, free, problems, notes",
    [
        (1, 100, 100, [], []),
        (1, 100, 2, [], ["little-memory"]),
        (1, 2, 2, ["not-enough-memory"], []),
        (4, 11, 11, [], []),
        (4, 10, 10, ["not-enough-memory"], []),
    ],
)
def test_a_host_has_the_memory_of_its_ranks_together(
    monkeypatch, ranks, total, free, problems, notes
):
    """125M parameters, 16 bytes each, and activations: 2.6 GiB a rank."""
    flags = (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
        "--max-position-embeddings 1024 --tokenizer-type NullTokenizer --vocab-size 50257 "
        "--micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 4 --mock-data"
    )
    config, plan = planned(flags, ranks)
    assert 2.5 < fit.fullest(config, plan).total / GIB < 2.7
    said: list[str] = []
    monkeypatch.setattr(host, "total_memory", lambda *_: total * GIB)
    monkeypatch.setattr(host, "available_memory", lambda *_: free * GIB)
    monkeypatch.setattr(log, "warn_once", said.append)
    monkeypatch.setattr(launcher, "info", lambda: SimpleNamespace(local_world_size=ranks))
    assert codes_of(memory.problems_of_host(config, plan, on_cpu=True)) == problems
    assert codes_of(said) == notes
    assert not list(memory.problems_of_host(config, plan, on_cpu=False))


def test_snapshots_of_a_gpu_run_are_in_the_hosts_memory(monkeypatch):
    config, plan = planned(LLAMA_8B, 8)
    monkeypatch.setattr(fit, "host_copies", lambda *_: {"--some-flag": 40 * GIB})
    monkeypatch.setattr(host, "total_memory", lambda *_: 30 * GIB)
    monkeypatch.setattr(launcher, "info", lambda: SimpleNamespace(local_world_size=1))
    assert codes_of(memory.problems_of_host(config, plan, on_cpu=False)) == ["not-enough-memory"]


@pytest.mark.parametrize("gpu_shows", [False, True])
def test_a_model_that_is_too_large_is_refused_before_torch(tmp_path, monkeypatch, gpu_shows):
    """Where a GPU shows, its memory counts, which torch knows."""
    line = command_line.read(shlex.split(GPT_154B), {}, tree=RunConfig)
    monkeypatch.setattr(host, "shows_accelerator", lambda: gpu_shows)
    monkeypatch.setattr(host, "total_memory", lambda *_: 24 * GIB)
    if gpu_shows:
        preflight.check(line)
        return
    with pytest.raises(SystemExit) as end:
        preflight.check(line)
    assert end.value.code == 2


def line_of(config):
    """Of the command line what the memory is judged by."""
    return SimpleNamespace(config=config, script=NO_SCRIPT)


@pytest.mark.parametrize(
    "free, total, code", [(90, 90, None), (20, 90, "little-memory"), (20, 20, "not-enough-memory")]
)
def test_the_memory_of_a_device_counts(monkeypatch, free, total, code):
    config, plan = planned(LLAMA_8B, 64)
    assert 80 < fit.fullest(config, plan).total / GIB < 90
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once", said.append)
    monkeypatch.setattr(device, "free_memory", lambda _: (free * GIB, total * GIB))
    monkeypatch.setattr(device, "name", lambda _: "NVIDIA H100")
    runtime = SimpleNamespace(device=torch.device("cuda", 3))
    if code == "not-enough-memory":
        with raises(ValueError, code):
            memory.check(line_of(config), plan, runtime)
    else:
        memory.check(line_of(config), plan, runtime)
        assert codes_of(said) == [code] * bool(code)


ERRORS = {
    "cuda": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB."
    ),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "host": MemoryError(),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_memory_that_ran_out_is_one_line(monkeypatch, kind):
    config, plan = planned(LLAMA_8B, 8)
    monkeypatch.setattr(device, "free_memory", lambda _: (1 * GIB, 80 * GIB))
    report = {"allocated": 70 * GIB, "max allocated": 77 * GIB, "reserved": 72 * GIB}
    monkeypatch.setattr(device, "memory_report", lambda _: report)
    monkeypatch.setattr(host, "total_memory", lambda *_: 80 * GIB)
    runtime = SimpleNamespace(device=torch.device("cuda" if kind == "cuda" else "cpu"))
    with pytest.raises(ValueError) as error, memory.explained(line_of(config), plan, runtime):
        raise ERRORS[kind]
    text = str(error.value)
    assert_problem(text, "out-of-memory")
    assert flags_named(text) and "activations" in text
    assert error.value.__cause__ is None
    assert (" 7.00 GiB" in text) is (kind == "cuda")


def test_other_errors_pass():
    config, plan = planned(LLAMA_8B, 8)
    with (
        pytest.raises(RuntimeError, match="^shape$"),
        memory.explained(line_of(config), plan, None),
    ):
        raise RuntimeError("shape")


@pytest.mark.parametrize(
    "words", ["80GB", "80GiB", "80 GB", "80G", "80gb", "81920MiB", "80", "80.0"]
)
def test_memory_may_be_named_as_gpus_are(words):
    parser = command_line.parser(RunConfig)
    for argv in (["--device-memory", words], ["--device-memory", *words.split()]):
        assert parse_typed(parser, argv) == {"device_memory": 80.0}
    for wrong in ("80B", "80TB", "GB", "eighty"):
        with raises(Problems, "value-malformed", "--device-memory"):
            parse_typed(parser, ["--device-memory", wrong])
