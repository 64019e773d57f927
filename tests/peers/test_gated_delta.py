"""A gated delta net alone against transformers' of Qwen3-Next and against megatron-core's: outputs and
the gradients of weights and input."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.kernels import delta_rule
from megatron.model.blocks.module import LayerInputs
from tests.core.model.tiny import tiny_model
from tests.peers.megatron_core_models import let_it_run_on_a_cpu

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
HIDDEN = 64
SIZES = {
    "values of two heads": dict(linear_num_key_heads=2, linear_num_value_heads=4),
    "as many values": dict(linear_num_key_heads=3, linear_num_value_heads=3),
    "wide values": dict(linear_value_head_dim=24, linear_conv_kernel_dim=3),
}


def net_of(sizes: dict) -> tuple[torch.nn.Module, dict]:
    flags = dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="[1]",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        num_layers=1,
        hidden_size=HIDDEN,
    )
    flags |= sizes
    model = tiny_model(scramble=True, **flags)
    return model.decoder.layers["0"].self_attention, flags | dict(linear_conv_kernel_dim=4) | sizes


def by_parts(rows: torch.Tensor, facts, count: int) -> list[torch.Tensor]:
    """Rows by key head -> those of all heads, part by part."""
    grouped = rows.unflatten(0, (facts.model.linear_num_key_heads, -1))
    return [part.flatten(0, 1) for part in grouped.split(facts.parts[:count], 1)]


def compare(net, theirs, weights: dict[str, torch.Tensor], run) -> None:
    """`weights`: what theirs are, made of ours so that gradients come back to ours."""
    s = delta_rule.CHUNK + 13
    x = torch.randn(s, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(weights[name].view(p.shape))
    got, want = net(x, LayerInputs(), {}), run(theirs, x)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    into = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    mine = dict(net.named_parameters())
    (grad, *grads) = torch.autograd.grad(got, [x, *mine.values()], into)
    names = [name for name, _ in theirs.named_parameters()]
    (other, *others) = torch.autograd.grad(want, [x, *theirs.parameters()], into)
    torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)
    # theirs through the making of their weights
    made = [weights[name] for name in names]
    back = torch.autograd.grad(
        made, list(mine.values()), [g.view(m.shape) for g, m in zip(others, made, strict=True)]
    )
    for name, g, other in zip(mine, grads, back, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(g, other, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_transformers(sizes):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    net, flags = net_of(sizes)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
        **{
            name: value
            for name, value in flags.items()
            if name.startswith("linear_") and "freq" not in name
        },
    )
    rows = net.in_proj.weight.unflatten(0, (flags["linear_num_key_heads"], -1))
    r = flags["linear_num_value_heads"] // flags["linear_num_key_heads"]
    weights = {
        "in_proj_qkvz.weight": rows[:, : -2 * r].flatten(0, 1),
        "in_proj_ba.weight": rows[:, -2 * r :].flatten(0, 1),
        "conv1d.weight": torch.cat(by_parts(net.conv1d["weight"], net.facts, 3)),
        "dt_bias": net.dt_bias * 1,
        "A_log": net.A_log * 1,
        "norm.weight": net.out_norm.weight * 1,
        "out_proj.weight": net.out_proj.weight * 1,
    }
    theirs = modeling.Qwen3NextGatedDeltaNet(config, 0)
    compare(net, theirs, weights, lambda m, x: m(x.transpose(0, 1)).transpose(0, 1))


@pytest.fixture
def one_cpu_rank(tmp_path, monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.ssm import gated_delta_net

    let_it_run_on_a_cpu(monkeypatch)
    monkeypatch.setattr(gated_delta_net, "HAVE_FLA", True)
    norm = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()  # noqa: E731
    monkeypatch.setattr(gated_delta_net, "l2norm", norm, raising=False)
    store = dist.FileStore(str(tmp_path / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield gated_delta_net
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_megatron_core(sizes, one_cpu_rank):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    net, flags = net_of(sizes)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        deterministic_mode=True,
        use_cpu_initialization=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1],
        **{
            name: value
            for name, value in flags.items()
            if name.startswith("linear_") and "freq" not in name
        },
    )
    theirs = one_cpu_rank.GatedDeltaNet(
        config,
        one_cpu_rank.GatedDeltaNetSubmodules(
            ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear
        ),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    weights = {
        "in_proj.weight": torch.cat(by_parts(net.in_proj.weight, net.facts, 6)),
        "conv1d.weight": torch.cat(by_parts(net.conv1d["weight"], net.facts, 3)),
        "dt_bias": net.dt_bias * 1,
        "A_log": net.A_log * 1,
        "out_norm.weight": net.out_norm.weight * 1,
        "out_proj.weight": net.out_proj.weight * 1,
    }
    compare(net, theirs, weights, lambda m, x: m(x, None)[0])
