"""What the preamble says would make a run faster, on devices that are not here."""

import pytest
import torch

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels.cpu import native
from megatron.training.logging.preamble import hints

CUDA = torch.device("cuda", 0)
FAST = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=2048,
    max_position_embeddings=2048,
    micro_batch_size=2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    bf16=True,
    torch_compile=True,
)
EAGER = {"torch_compile": False}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({}, []),
        ({"bf16": False}, ["--bf16"]),
        ({"bf16": False, "tf32": True}, []),
        ({"bf16": False, "fp16": True}, []),
        ({"bf16": False, "fp64": True}, []),
        ({"attention_dropout": 0.1}, ["--attention-dropout 0.1"]),
        ({"hidden_dropout": 0.2}, ["--hidden-dropout 0.2"]),
        (
            {"attention_dropout": 0.125, "hidden_dropout": 0.125},
            ["0.125 and --hidden-dropout 0.125"],
        ),
        ({"micro_batch_size": 1}, ["2,048 tokens"]),
        ({"context_parallel_size": 4}, ["1,024 tokens"]),
        (EAGER, ["--torch-compile"]),
        (EAGER | {"num_experts": 4}, []),
        (EAGER | {"transformer_impl": "transformer_engine"}, []),
        (EAGER | {"fp8": "hybrid", "fp8_recipe": "delayed"}, []),
        (EAGER | {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, ["--torch-compile"]),
        (
            EAGER | {"bf16": False, "hidden_dropout": 0.1, "micro_batch_size": 1},
            ["--bf16", "--hidden-dropout", "2,048", "--torch-compile"],
        ),
    ],
)
def test_what_is_slow_on_cuda(changes, named):
    """One line each, only where it applies, and none on other devices."""
    config = config_from(Config, FAST | changes)
    lines = hints(config, CUDA)
    assert len(lines) == len(named)
    assert all(text in line and len(line) <= 97 for text, line in zip(named, lines, strict=True))
    assert hints(config, torch.device("xpu", 0)) == []


@pytest.mark.parametrize("capability, hinted", [("AVX2", True), ("DEFAULT", False)])
def test_kernels_of_the_cpu_that_were_not_built(monkeypatch, capability, hinted):
    """As setup.py leaves them out where there is a GPU; without AVX2 building would not help."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(native, "load", lambda capability: f"not built; {native.BUILD}")
    lines = hints(config_from(Config, FAST), torch.device("cpu"))
    assert [native.BUILD in line for line in lines] == [True] * hinted
    monkeypatch.setattr(native, "load", lambda capability: native)
    assert hints(config_from(Config, FAST), torch.device("cpu")) == []
