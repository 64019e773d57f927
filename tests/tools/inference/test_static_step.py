"""The decoding step that a CUDA graph holds: its logits and texts are those of the other one, and
what a graph cannot hold is found. By stand-ins: recorded operations on a CPU, the meta device."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron import cuda
from megatron.inference.cached_model import CachedModel
from megatron.inference.engine import Engine, Request
from megatron.inference.sampling import Sampling
from megatron.inference.static_step import StaticStep, bucket
from megatron.kernels.cuda_graph import NotStatic, Watch
from megatron.model.gpt import GPTModel
from tests.core.model.tiny import MODELS, MOE, OPTIONS, VOCAB, tiny_model
from tests.graph_on_cpu import graphs  # noqa: F401  # a fixture

GREEDY = Sampling(temperature=0.0)
LONG = {"seq_length": 600, "max_position_embeddings": 600}
DENSE = {name: flags for name, flags in OPTIONS.items() if "num_experts" not in flags}


def texts(model, prompts: list[list[int]], rows: int, sampling: Sampling) -> list[list[int]]:
    """The new tokens of each prompt, of which texts of different lengths follow."""
    result: list[list[int]] = [[] for _ in prompts]
    requests = [Request(prompt, 9 + 3 * n, sampling) for n, prompt in enumerate(prompts)]
    for number, _, token in Engine(model, rows).run(requests):
        result[number].append(token.id)
    return result


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 0.8, 3, 20, 1.2)], ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        MOE,
        *(pytest.param(flags, marks=pytest.mark.campaign) for flags in MODELS.values()),
    ],
    ids=["experts", *MODELS],
)
def test_texts_are_the_same(flags, sampling, graphs, monkeypatch, capsys):  # noqa: F811
    """Prompts of many lengths, more than there are rows, past the first number of positions."""
    draw = random.Random(3)
    prompts = [
        [draw.randrange(VOCAB) for _ in range(length)] for length in (1, 40, 252, 2, 520, 17)
    ]
    flags = {**flags, **LONG}
    found = texts(tiny_model(torch.float64, scramble=True, **flags), prompts, 3, sampling)
    assert bool(capsys.readouterr().err) == (not graphs)
    assert len(graphs) > 3 and all(graph.replays for graph in graphs[:2]) or "num_experts" in flags
    monkeypatch.setattr(cuda, "has_graphs", lambda device: False)
    expected = texts(tiny_model(torch.float64, scramble=True, **flags), prompts, 3, sampling)
    assert found == expected
    assert len({token for text in found for token in text}) > 5


def test_prompts_are_read_in_few_lengths(graphs):  # noqa: F811
    model = tiny_model(torch.float64, **LONG)
    read = set()
    model.embedding.register_forward_hook(lambda _, args, __: read.add(args[0].shape[1]))
    cached = CachedModel(model, 1, 100)
    for length in range(2, 90, 3):
        cached.forward([[3] * length], [0])
    assert read == {16, 32, 64, 100}
    read.clear()
    cached.forward([[3] * 5], [95])  # not beyond the end of the cache
    assert read == {5}


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 20), (20, 20)]
)
def test_buckets(size, expected):
    assert bucket(size, 4, 20) == expected


# What a graph cannot hold.


class Planted(nn.Module):
    """A script's own module in the place of an MLP, with something planted into it."""

    def __init__(self, plant):
        super().__init__()
        self.plant = plant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + self.plant(x)


PLANTS = {
    "a number": lambda x: x * x.sum().item(),
    "a list": lambda x: x * x.flatten()[:1].tolist()[0],
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "an int": lambda x: x * int(x.sum()),
    "a copy to the host": lambda x: x.cpu().to(x.device),
    "nonzero": lambda x: x + x.nonzero().sum(),
    "a mask": lambda x: x + x[x > 0].sum(),
    "into a mask": lambda x: x.clone().index_put_((x > 0,), x.new_zeros(())),
    "bincount": lambda x: x + x.argmax(-1).flatten().bincount().sum(),
    "Python's random numbers": lambda x: x + torch.full_like(x, random.random()),
    "a seed": lambda x: x + random.getrandbits(30),
    "a seeded generator": lambda x: x.clone().normal_(generator=torch.Generator(x.device)),
    "torch.tensor": lambda x: x + torch.tensor([1.0], device=x.device),
    "torch.tensor of a number": lambda x: x + torch.tensor(1.0),
    "as_tensor": lambda x: x + torch.as_tensor([1.0], device=x.device),
    "new_tensor": lambda x: x + x.new_tensor([1.0]),
}


def watch_twice(model: GPTModel, device: str) -> Watch:
    """The second of two steps at other positions, the first of which saw the same."""
    held = CachedModel(model.to(device), 3, 16)
    step = StaticStep(held._logits, 3, 16, torch.device(device))
    watches = []
    for place in (3, 7):
        step._inputs.copy_(torch.tensor([[1, 2, 3], [place, 1, 5]]))
        with Watch(torch.device(device)) as watch:
            step.region(3, 16)
        watches.append(watch)
    watches[0].compare(watches[1])
    return watches[1]


def watched(plant, device: str) -> None:
    """Two steps of a model with this in it."""
    model = tiny_model()
    model.decoder.layers["1"].mlp = Planted(plant)
    watch_twice(model, device)


CASES = [(plant, device) for plant in PLANTS for device in ("cpu", "meta")]
CASES.remove(("a list", "cpu"))  # on a CPU nothing is copied
CASES.remove(("a copy to the host", "cpu"))
CASES.remove(("a seeded generator", "meta"))  # meta has none


@pytest.mark.parametrize(("plant", "device"), CASES)
def test_what_a_graph_cannot_hold_is_found(plant, device):
    """Meta stands for CUDA."""
    with pytest.raises(NotStatic):
        watched(PLANTS[plant], device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_is_another_one_each_time_is_found(device):
    outside = iter([torch.ones(32, device=device) for _ in range(2)])
    with pytest.raises(NotStatic):
        watched(lambda x: x + next(outside), device)
    counts = iter([3, 4])
    with pytest.raises(NotStatic):
        watched(lambda x: x + x[..., : next(counts)].sum(), device)
    times = iter([1, 2])
    with pytest.raises(NotStatic):
        watched(lambda x: sum((x.sin() for _ in range(next(times))), start=x), device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_constants_of_kernels_and_memory_that_stays_are_none(device):
    stays = torch.ones(32, device=device)
    watched(
        lambda x: (
            (x + stays).clamp(min=1.0)
            + torch.full_like(x, 2.0)
            + x[torch.zeros_like(x[:, :, 0], dtype=torch.long)].sum()
        ),
        device,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("flags", DENSE.values(), ids=DENSE)
def test_our_models_have_nothing_of_it(flags, device):
    assert len(watch_twice(tiny_model(**flags), device).calls) > 100


def reading() -> GPTModel:
    """A model that reads the host in each layer, though its result does not depend on it."""
    model = tiny_model(torch.float64, scramble=True)
    plant = Planted(lambda x: x.relu() if x.square().sum().item() >= 0 else -x)
    model.decoder.layers["1"].mlp = plant
    return model


def test_a_model_that_reads_the_host_decodes_without(graphs, monkeypatch, capsys):  # noqa: F811
    """One line says so and why."""
    prompts = [[1, 2, 3], [4]]
    found = texts(reading(), prompts, 2, GREEDY)
    said = capsys.readouterr().err
    assert not graphs and said.count("\n") == 1 and "aten._local_scalar_dense" in said
    monkeypatch.setattr(cuda, "has_graphs", lambda device: False)
    assert found == texts(reading(), prompts, 2, GREEDY)


# What asks torch.cuda, and how often the device is read.


def test_a_graph_is_recorded_by_torch(monkeypatch):
    asked = []

    class Recorded:
        def __init__(self):
            self.pool = lambda: f"pool {len(asked)}"

    @contextlib.contextmanager
    def recording(graph, **options):
        asked.append((graph, options))
        yield

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(CUDAGraph=Recorded, graph=recording))
    first, result = cuda.record(lambda: 5)
    cuda.record(lambda: 6, first)
    assert result == 5 and asked[0][0] is first
    assert [options for _, options in asked] == [
        {"pool": pool, "capture_error_mode": "thread_local"} for pool in (None, "pool 1")
    ]
    assert cuda.has_graphs(torch.device("cuda", 1)) and not cuda.has_graphs(torch.device("cpu"))


def test_a_recording_that_fails_leaves_the_text_right(graphs, monkeypatch, capsys):  # noqa: F811
    def fails(*_):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(cuda, "record", fails)
    prompts = [[1, 2, 3], [4, 5]]
    found = texts(tiny_model(torch.float64, scramble=True), prompts, 2, GREEDY)
    assert "operation not permitted\n" in capsys.readouterr().err
    monkeypatch.setattr(cuda, "has_graphs", lambda device: False)
    assert found == texts(tiny_model(torch.float64, scramble=True), prompts, 2, GREEDY)


class OnDevice(torch.Tensor):
    """Counts what a device would have to wait for."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if func.__name__ in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
            OnDevice.reads += 1
        elif func.__name__ in ("cpu", "numpy"):
            OnDevice.reads += 1
            return result.as_subclass(torch.Tensor)
        return result


@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [(GREEDY, None), (GREEDY, 2), (Sampling(0.7, 0.9), None), (Sampling(0.0, 1, 1, 0, 1.3), 1)],
)
def test_a_step_reads_the_device_once(sampling, logprobs, graphs, monkeypatch):  # noqa: F811
    forward = CachedModel.forward
    monkeypatch.setattr(CachedModel, "forward", lambda *args: forward(*args).as_subclass(OnDevice))
    one = Engine(tiny_model(torch.float64), 3)
    for start in range(3):
        one.add(Request([start], 8, sampling, logprobs=logprobs if start else None))
    for _ in range(8):
        OnDevice.reads = 0
        assert len(list(one.step())) == 3
        assert OnDevice.reads == 1
    assert [graph.replays for graph in graphs] == [6]
