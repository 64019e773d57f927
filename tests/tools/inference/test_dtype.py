"""Models with matrices of 16 bits on a CPU against rounded ones in fp32: logits, texts in every
batch; and models that torch's own .to casts."""

from pathlib import Path

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.inference import linear
from megatron.inference.cached_model import CachedModel
from megatron.inference.engine import Engine, Request
from megatron.inference.generate import load_model
from megatron.inference.linear import store_matrices_as
from megatron.inference.load_model import wanted_precision
from megatron.inference.sampling import Sampling
from megatron.model.gpt import GPTModel
from tests.core.model.tiny import MODELS, MOE, VOCAB, tiny_model
from tests.load_tool import exit_code, load_tool
from tests.problems import raises
from tests.runs import train

OPTIONS = {
    **MODELS,
    "experts": MOE,
    "untied": {**MODELS["llama"], "untie_embeddings_and_output_weights": True},
    "only norms behind": {
        **MODELS["llama"],
        "no_pre_layernorm": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    },
    "xielu": {**MODELS["llama"], "swiglu": False, "xielu": True},
}
LONG = {"seq_length": 64, "max_position_embeddings": 64}
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half the distance of two numbers at 1
TEXT = torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(3))
GREEDY = Sampling(temperature=0.0)


def stored(dtype: torch.dtype, **flags: object) -> GPTModel:
    """A scrambled model with matrices of this dtype."""
    source = tiny_model(scramble=True, **flags)
    model = tiny_model(**flags)
    store_matrices_as(model, dtype)
    values = {p.sharding.name: p for p in source.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(values[parameter.sharding.name])
    return model


def is_matrix(name: str) -> bool:
    """Is it stored in 16 bits?"""
    return (
        ".linear_" in name
        and name.endswith("weight")
        or name.endswith(("word_embeddings.weight", "output_layer.weight"))
    )


@torch.no_grad()
def logits(model: GPTModel, cached: bool) -> torch.Tensor:
    """Of the last position of TEXT."""
    if not cached:
        return model(TEXT)[0, -1]
    held = CachedModel(model, 2, 16)
    held.forward(TEXT[:, :9].tolist(), [0])
    for place in range(9, 13):
        held.forward(TEXT[:, place : place + 1].tolist(), [place])
    return held.forward(TEXT[:, 13:].tolist(), [13])[0]


@pytest.mark.parametrize("widened", [1, 2**22])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_those_of_rounded_matrices_in_fp32(flags, dtype, cached, widened, monkeypatch):
    monkeypatch.setattr(linear, "WIDENED", widened)
    exact = tiny_model(scramble=True, **flags)
    rounded = tiny_model(scramble=True, **flags)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if is_matrix(parameter.sharding.name):
                parameter.copy_(parameter.to(dtype))
    model = stored(dtype, **flags)
    kept = {p.sharding.name: p.dtype for p in model.parameters()}
    assert kept == {name: dtype if is_matrix(name) else torch.float32 for name in kept}
    found = logits(model, cached)
    expected = logits(rounded, False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))
    apart = (found - logits(exact, False)).norm() / expected.norm()
    assert 0 < apart < 8 * STEP[dtype]


def texts(engine: Engine, prompts: list[list[int]], order: list[int], new: int) -> list[list[int]]:
    """The new tokens of each prompt, which arrive in this order."""
    found: list[list[int]] = [[] for _ in prompts]
    requests = [Request(prompts[n], new + n, GREEDY) for n in order]
    for number, _, token in engine.run(requests):
        assert token is not None
        found[order[number]].append(token.id)
    return found


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(
    "flags",
    [MODELS["gpt"], MODELS["llama"], pytest.param(MOE, marks=pytest.mark.campaign)],
    ids=["gpt", "llama", "moe"],
)
def test_greedy_texts_are_the_same_in_every_batch(flags, dtype):
    generator = torch.Generator().manual_seed(9)
    lengths = [1, 30, 7, 2]
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    flags = {**flags, **LONG, "hidden_size": 96, "num_attention_heads": 4}
    alone = [
        texts(Engine(stored(dtype, **flags), 1), [prompt], [0], 16 + number)[0]
        for number, prompt in enumerate(prompts)
    ]
    assert len({token for text in alone for token in text}) > 7
    for rows, order in ((2, [*range(4)]), (4, [*range(4)]), (3, [3, 2, 0, 1])):
        assert texts(Engine(stored(dtype, **flags), rows), prompts, order, 16) == alone


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_a_model_that_is_cast_is_one_that_was_built_so(flags, dtype):
    """Also after generating, when its layers are those of inference; rotary tables stay fp32."""
    source = tiny_model(scramble=True, **flags)
    built = tiny_model(dtype, **flags)
    with torch.no_grad():
        for to, value in zip(built.parameters(), source.parameters(), strict=True):
            to.copy_(value)
    expected = logits(built, True)
    assert torch.equal(logits(source.to(dtype), True), expected)
    used = tiny_model(scramble=True, **flags)
    logits(used, True)
    found = logits(used.to(dtype), True)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_a_stored_model_can_be_cast():
    for dtype in (torch.float32, torch.bfloat16):
        model = stored(torch.bfloat16, **MODELS["gated with biases"]).to(dtype)
        assert torch.isfinite(logits(model, True)).all()


@pytest.mark.parametrize(
    ("flag", "trained", "device", "expected"),
    [
        ("auto", {"bf16": True}, "cuda", "bfloat16"),
        ("auto", {"fp16": True}, "cuda", "float16"),
        ("auto", {}, "cuda", "float32"),
        ("auto", {"fp64": True}, "cuda", "float32"),
        ("auto", {"bf16": True}, "cpu", "float32"),
        ("bf16", {}, "cpu", "bfloat16"),
        ("fp32", {"bf16": True}, "cuda", "float32"),
        ("fp16", {"bf16": True}, "cuda", "float16"),
    ],
)
def test_the_dtype_is_that_of_training_on_an_accelerator(flag, trained, device, expected):
    found = wanted_precision(flag, PrecisionConfig(**trained), torch.device(device))
    assert found.params_dtype == expected


SIZE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1e-2 --save-interval "
    "1 --eval-iters 0 --mock-data --vocab-size 50 --device cpu --num-workers 0 --no-save-optim "
    "--optimizer sgd"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory of a small model."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "log", [*SIZE, "--save", str(folder / "run")])
    return folder / "run"


def test_tools_and_python_load_it_so(run, capfd):
    words = [run, "1 2 3", "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    said = {}
    for dtype in ("bf16", "fp32", "auto"):
        assert exit_code(load_tool("generate").main, *words, "--dtype", dtype) == 0
        said[dtype] = capfd.readouterr().out
        model = load_model(run, device="cpu", dtype=dtype)
        text = model.generate("1 2 3", 4, temperature=0.0)
        assert said[dtype].strip() == f"1 2 3{text}".strip()
        kinds = {p.dtype for p in model.trained.model.parameters()}
        assert kinds == {torch.float32} | ({torch.bfloat16} if dtype == "bf16" else set())
    assert exit_code(load_tool("generate").main, run, "--dtype", "bf17") == 2
    assert "value-not-a-choice" in capfd.readouterr().err
    with raises(ValueError, "value-not-a-choice", "dtype"):
        load_model(run, device="cpu", dtype="bfloat16")
