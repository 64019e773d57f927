"""A model of a script's own trains as a plain loop of torch does, in data-parallel layouts, and as
our GPT does where it computes the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from megatron.inference.load_model import open_trained_model
from megatron.parallel.sharding import Sharding, draw_values
from megatron.training import GPTModel, ModelType, pretrain, script_model
from tests.core.parity.layouts import CP, DISTRIBUTED, PP, TP
from tests.core.training.own_models import (
    FLAGS,
    ITERATIONS,
    Nano,
    Split,
    Texts,
    gpt_step,
    own_loss,
    own_step,
    run,
    split_spec,
    without_dropout,
)
from tests.forkrun import RanksFailed
from tests.problems import raises
from tests.runs import same_tensors


@pytest.fixture(autouse=True)
def no_group_stays():
    """A script's model of one process gets a process group, which would outlast the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Whole(nn.Module):
    """`Split` in plain torch; logits [b, s, 216], of padding without a chance."""

    def __init__(self):
        super().__init__()
        values = {
            name: draw_values(Sharding(name, spec.shape, init=spec.init, std=spec.std), 1234)
            for name in Split.PARAMETERS
            for spec in [split_spec(name)]
        }
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(value) for name, value in values.items()}
        )
        self.norm, self.last_norm = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, tokens):
        w = self.weights
        x = w["embedding"][tokens]
        wide = F.gelu(F.linear(self.norm(x), w["up"], w["up_bias"]))
        x = x + F.linear(wide, w["down"], w["down_bias"])
        return F.linear(self.last_norm(x), w["head"])[..., :211]


def by_plain_torch(
    made=without_dropout,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step, and the weights, by torch's own loop."""
    torch.manual_seed(1234)
    model, data = made().double(), Texts()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(ITERATIONS):
        batch = [data[8 * step + k] for k in range(8)]
        tokens, labels, mask = (torch.stack([s[k] for s in batch]) for k in batch[0])
        loss, count, _ = own_loss(labels, mask.double(), model(tokens))
        optimizer.zero_grad()
        (loss / count).backward()
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        for p in trained:
            if p.grad is None:  # as the suite, with a moment for it too
                p.grad = torch.zeros_like(p)
        optimizer.step()
        steps.append(((loss / count).item(), norm.item()))
    return steps, {name: p.detach() for name, p in model.named_parameters()}


LAYOUTS = {
    "one": (1, []),
    "both": (4, [*DISTRIBUTED, TP, "2", "--overlap-grad-reduce"]),
    "data": (2, []),
    "sharded": (2, DISTRIBUTED),
    "overlapped": (2, [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]),
    "tensor": (2, [TP, "2"]),
    "sequence": (2, [TP, "2", "--sequence-parallel"]),
    "context": (2, [CP, "2"]),
    "pipeline": (2, [PP, "2"]),
}


@pytest.mark.parametrize("layout", ["one", "data", "sharded", "overlapped"])
def test_a_module_of_torch_trains_as_in_a_plain_loop(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    rows, tensors = run(tmp_path / "own", "nano", *flags, world=world)
    steps, weights = by_plain_torch()
    assert [row["lm_loss"] for row in rows] == pytest.approx([loss for loss, _ in steps], rel=1e-10)
    assert [row["grad_norm"] for row in rows] == pytest.approx(
        [norm for _, norm in steps], rel=1e-10
    )
    assert {name for name in tensors if not name.startswith("optimizer.")} == weights.keys()
    for name, values in weights.items():
        torch.testing.assert_close(tensors[name], values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        "tensor",
        *(pytest.param(x, marks=pytest.mark.campaign) for x in ("one", "sharded", "sequence")),
        pytest.param("both", marks=pytest.mark.campaign),
    ],
)
def test_a_module_of_our_parallel_layers_trains_as_in_a_plain_loop(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    rows, tensors = run(tmp_path / "own", "split", *flags, world=world)
    steps, weights = by_plain_torch(Whole)
    assert [row["lm_loss"] for row in rows] == pytest.approx([loss for loss, _ in steps], rel=1e-10)
    assert [row["grad_norm"] for row in rows] == pytest.approx(
        [norm for _, norm in steps], rel=1e-10
    )
    for name, values in weights.items():
        name = name.removeprefix("weights.").replace("_bias", ".bias")
        torch.testing.assert_close(tensors[name], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        "sequence",
        *(
            pytest.param(x, marks=pytest.mark.campaign)
            for x in ("sharded", "one", "tensor", "context")
        ),
    ],
)
def test_a_layer_of_plain_torch_in_our_gpt_trains_as_ours(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    ours, theirs = run(tmp_path / "ours", "ours")
    rows, tensors = run(tmp_path / "own", "changed", *flags, world=world)
    for row, wanted in zip(rows, ours, strict=True):
        assert row == pytest.approx(wanted, rel=1e-10)
    for name, values in theirs.items():
        name = name.replace("layers.1.mlp.linear_fc1", "layers.1.mlp.up")
        name = name.replace("layers.1.mlp.linear_fc2", "layers.1.mlp.down")
        rows_of = 211 if values.shape[0] == 216 else None  # padding
        if not name.startswith("optimizer."):
            torch.testing.assert_close(
                tensors[name][:rows_of], values[:rows_of], rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("layout", ["one", pytest.param("pipeline", marks=pytest.mark.campaign)])
def test_our_gpt_as_it_is_changes_nothing(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    wanted, tensors = run(tmp_path / "ours", "ours", *flags, world=world)
    rows, again = run(tmp_path / "own", "gpt", *flags, world=world)
    assert rows == wanted
    same_tensors(tensors, again)
    assert open_trained_model(tmp_path / "own" / "save").iteration == ITERATIONS


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["one", "sharded"])
def test_a_killed_run_resumes_bit_for_bit_with_its_dropout(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    flags = [*flags, "--save-interval", "2"]
    wanted, tensors = run(tmp_path / "whole", "dropout", *flags, world=world)
    run(tmp_path / "two", "dropout", *flags, world=world, kill_at=4)
    rows, again = run(tmp_path / "two", "dropout", *flags, world=world)
    assert rows == wanted
    same_tensors(tensors, again)
    plain, _ = run(tmp_path / "plain", "nano", *flags, world=world)
    assert plain[0]["lm_loss"] != rows[0]["lm_loss"]


REFUSED = {
    "pipeline": ("nano", [PP, "2"], 2, "--pipeline-model-parallel-size"),
    "pipeline of a changed GPT": ("changed", [PP, "2"], 2, "--pipeline-model-parallel-size"),
    "context": ("nano", [CP, "2"], 2, "--context-parallel-size"),
    "tensor": ("nano", [TP, "2"], 2, "--tensor-model-parallel-size"),
    "recompute": ("nano", ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"], 1, "--recompute-granularity"),
    "muon": ("changed", ["--optimizer", "muon", "--muon-momentum", "0.95"], 1, "--optimizer muon"),
    "muP": ("changed", ["--use-mup", "--mup-base-hidden-size", "8"], 1, "--use-mup"),
    "rate of an embedding": ("nano", ["--decoupled-lr", "0.01"], 1, "--decoupled-lr"),
    "gradient of an embedding": ("nano", ["--embed-grad-scale", "0.1"], 1, "--embed-grad-scale"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_our_gpt_refuses_another_model(tmp_path, case):
    name, flags, world, said = REFUSED[case]
    with pytest.raises((RanksFailed, ValueError), match=rf"{said}.*\[own-model\]"):
        run(tmp_path / "own", name, *flags, world=world)
    assert not (tmp_path / "own" / "m").read_text()


@pytest.mark.parametrize(
    "name, flags, world, code",
    [
        ("nothing", [], 1, "model-provider-result"),
        ("counting", [], 1, "model-buffer-changed"),
        ("of each rank", [], 2, "model-differs-between-ranks"),
        ("unmarked", [TP, "2", "--sequence-parallel"], 2, "replicated-gradient"),
    ],
)
def test_a_wrong_model_is_named(tmp_path, name, flags, world, code):
    with pytest.raises((RanksFailed, ValueError), match=rf"model_provider: .*\[{code}\]"):
        run(tmp_path / "own", name, *flags, world=world)
    assert not (tmp_path / "own" / "m").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "changed",
        *(pytest.param(x, marks=pytest.mark.campaign) for x in ("other_activation", "hooked")),
    ],
)
def test_checkpoints_of_another_model_are_refused(tmp_path, name):
    run(tmp_path / "own", name)
    for read in (
        lambda: open_trained_model(tmp_path / "own" / "save"),
        lambda: run(tmp_path / "own", "ours", "--train-iters", "5"),
        lambda: run(tmp_path / "own", "nano", "--train-iters", "5"),
    ):
        with pytest.raises(Exception, match=r"\[(own-model|checkpoint-tensor-missing)\]"):
            read()


def test_a_dry_run_says_what_it_counts(tmp_path, capsys):
    model = ("--dry-run", "--mock-data", *FLAGS)
    pretrain(None, Nano, ModelType.encoder_or_decoder, own_step, argv=model)
    assert "model_provider" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        argv = [*model, "--device-memory", "80"]
        pretrain(None, Nano, ModelType.encoder_or_decoder, own_step, argv=argv)
    assert "[own-model]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [{"vocab_size": 999}, {"post_process": False}, {"rotary_percent": 0.5}, {"mtp_block_spec": 1}],
)
def test_arguments_of_the_gpt_must_be_those_of_the_flags(arguments):
    def provider():
        return GPTModel(**arguments)

    argv = [*FLAGS, "--mock-data"]
    with raises(ValueError, "model-argument", *arguments):
        pretrain(None, provider, ModelType.encoder_or_decoder, gpt_step, argv=argv)
    with pytest.raises(RuntimeError, match="model_provider"):
        script_model.GPTModel()
