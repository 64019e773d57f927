"""Logits, losses and gradients equal those of megatron-core's GPTModel with the same weights,
option by option.

megatron-core asks for CUDA in four places even on a CPU; they are patched for these tests (a
scratch buffer, a random number tracker, the current device, the process groups of one rank).
"""

import copy

import pytest
import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.model.blocks.mtp.module import Depths, rolled
from megatron.parallel.context import ParallelContext
from tests.core.model.tiny import tiny_config, tiny_model, tokens
from tests.forkrun import run_ranks
from tests.peers.megatron_core_models import VOCAB, let_it_run_on_a_cpu, mcore_model

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SIZE = dict(
    hidden_size=64, num_attention_heads=8, num_layers=3, seq_length=16, max_position_embeddings=32
)


@pytest.fixture(scope="module", autouse=True)
def one_cpu_rank(tmp_path_factory):
    from megatron.core import parallel_state

    with pytest.MonkeyPatch.context() as patch:
        let_it_run_on_a_cpu(patch)
        store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


ROPE = dict(position_embedding_type="rope")
MLA = dict(
    ROPE,
    multi_latent_attention=True,
    kv_lora_rank=20,
    qk_head_dim=12,
    qk_pos_emb_head_dim=8,
    v_head_dim=10,
    normalization="RMSNorm",
    add_bias_linear=False,
    swiglu=True,
)
OPTIONS = {
    "gpt2": {},
    "exact gelu": dict(bias_gelu_fusion=False),
    "no bias": dict(add_bias_linear=False),
    "qkv bias": dict(add_bias_linear=False, add_qkv_bias=True),
    "untied": dict(untie_embeddings_and_output_weights=True),
    "no positions": dict(position_embedding_type="none"),
    "rope": ROPE,
    "rope interleaved": dict(ROPE, rotary_interleaved=True),
    "rope half": dict(ROPE, rotary_percent=0.5),
    "rope half interleaved": dict(ROPE, rotary_percent=0.5, rotary_interleaved=True),
    "rope base": dict(ROPE, rotary_base=300),
    "rope scaled": dict(ROPE, kv_channels=16, use_rope_scaling=True, rope_scaling_factor=32.0),
    "rope interpolated": dict(ROPE, rotary_seq_len_interpolation_factor=4),
    "grouped queries": dict(group_query_attention=True, num_query_groups=2),
    "multi query": dict(ROPE, group_query_attention=True, num_query_groups=1),
    "head width": dict(kv_channels=24, group_query_attention=True, num_query_groups=4),
    "rms": dict(normalization="RMSNorm"),
    "qk layernorm": dict(qk_layernorm=True),
    "qk rms norm, rope": dict(ROPE, qk_layernorm=True, normalization="RMSNorm"),
    "epsilon": dict(norm_epsilon=0.01),
    "swiglu": dict(swiglu=True, ffn_hidden_size=176),
    "geglu": dict(geglu=True, ffn_hidden_size=176),
    "squared relu": dict(squared_relu=True),
    "score scaling": dict(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True),
    "llama": dict(
        ROPE,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        group_query_attention=True,
        num_query_groups=2,
        untie_embeddings_and_output_weights=True,
    ),
    "output gates, norms, GQA": dict(
        ROPE,
        attention_output_gate=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        group_query_attention=True,
        num_query_groups=2,
    ),
    "a pattern of blocks": dict(
        ROPE, hybrid_layer_pattern="**-*-", num_layers=None, attention_output_gate=True
    ),
    "latent attention": MLA,
    "latent attention, rope": dict(MLA, q_lora_rank=24, rope_type="rope"),
    "latent attention, norms, yarn": dict(
        MLA,
        q_lora_rank=24,
        qk_layernorm=True,
        rotary_scaling_factor=8.0,
        original_max_position_embeddings=8,
        beta_fast=3.0,
        mscale=0.7,
        mscale_all_dim=1.3,
    ),
    "latent attention, learned positions beside it, LayerNorm": dict(
        MLA,
        q_lora_rank=24,
        qk_layernorm=True,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        rotary_scaling_factor=4.0,
    ),
}


def pair(flags, parallel=None, rank=0):
    parallel = parallel or ParallelConfig()
    ctx = ParallelContext(parallel, parallel.tensor_model_parallel_size, rank)
    sizes = SIZE | flags
    ours = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, ctx=ctx, **sizes)
    theirs = mcore_model(tiny_config(**sizes), parallel)
    mine = dict(ours.named_parameters())
    assert set(mine) == {name for name, _ in named(theirs)}
    with torch.no_grad():
        for name, p in named(theirs):
            p.copy_(mine[name].view(p.shape))
    return ours, theirs


def named(theirs):
    """Parameters by our names."""
    for name, p in theirs.named_parameters():
        yield name.replace("decoder.final_norm.", "decoder.final_layernorm."), p


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_same_numbers(flags):
    ours, theirs = pair(flags)
    ids, _ = tokens(vocab=VOCAB)
    positions = torch.arange(16).expand(2, 16)
    hidden = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    expected = theirs(ids, positions, hidden)
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(ids), expected, rtol=1e-5, atol=1e-5)
    same_loss_and_gradients(ours, theirs)


def same_loss_and_gradients(ours, theirs, finished=lambda name, grad: grad, depths=None):
    ids, labels = tokens(vocab=VOCAB)
    positions = torch.arange(16).expand(2, 16)
    hidden = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    losses = ours(ids, labels=labels, depths=depths)
    expected = theirs(ids, positions, hidden, labels=labels)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    expected.mean().backward()
    mine = {name: finished(name, p.grad) for name, p in ours.named_parameters()}
    for name, p in named(theirs):
        torch.testing.assert_close(
            mine[name].view(p.shape),
            p.grad,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_multi_token_prediction(tied):
    """Losses of two depths and all gradients; theirs are means of each depth's tokens."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    flags = dict(OPTIONS["llama"], untie_embeddings_and_output_weights=not tied)
    ours, theirs = pair(dict(flags, mtp_num_layers=2, mtp_loss_scaling_factor=0.7))
    rows = rolled(*tokens(vocab=VOCAB), None, None, 2)
    depths = Depths([(row, 0.7 / 2 / row.mask.sum().item()) for row in rows])
    MTPLossLoggingHelper.tracker.clear()
    same_loss_and_gradients(ours, theirs, depths=depths)
    for k, expected in enumerate(MTPLossLoggingHelper.tracker["values"], 1):
        total, count = depths.metrics[f"mtp_{k} loss"]
        torch.testing.assert_close(total / count, expected, rtol=1e-5, atol=0)


def on_a_rank(rank, world, cases):
    """All cases in one process, whose start takes longer than they do."""
    from megatron.core import parallel_state
    from megatron.core.transformer import torch_norm

    patch = pytest.MonkeyPatch()
    let_it_run_on_a_cpu(patch)
    new_norm = torch_norm.WrappedTorchNorm.__new__

    def norm(cls, config, *args, **options):
        """Its torch norm refuses sequence parallelism, whose part it has no part in: that is who
        sums the gradients."""
        config = copy.copy(config)
        config.sequence_parallel = False
        return new_norm(cls, config, *args, **options)

    patch.setattr(torch_norm.WrappedTorchNorm, "__new__", norm)
    parallel_state.initialize_model_parallel(world)
    for name, sequence_parallel in cases:
        print(name, sequence_parallel)
        same_on_a_rank(
            rank,
            OPTIONS[name],
            ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel),
        )


def same_on_a_rank(rank, flags, parallel):
    ours, theirs = pair(flags, parallel, rank)

    def sum_positions(name, grad):
        """They gather the positions' gradient while they go back; here it is summed with the
        norms', after that."""
        if parallel.sequence_parallel and "position_embeddings" in name:
            dist.all_reduce(grad)
        return grad

    same_loss_and_gradients(ours, theirs, sum_positions)


@pytest.mark.parametrize(
    "cases",
    [
        (("gpt2", True), ("llama", False), ("output gates, norms, GQA", True)),
        pytest.param(
            (("gpt2", False), ("qk layernorm", False), ("qk layernorm", True), ("llama", True)),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["some", "others"],
)
def test_same_numbers_on_two_tensor_parallel_ranks(cases):
    """Each rank's part of every gradient, before anything is summed over ranks, is theirs (but see
    the positions)."""
    run_ranks(2, on_a_rank, cases)


def test_documents():
    """Our document ids against a dense mask of theirs, with positions that start again in each
    document."""
    ours, theirs = pair({})
    ids, _ = tokens(vocab=VOCAB)
    documents = (torch.arange(16) >= torch.tensor([[5], [11]])).long()
    starts = torch.tensor([[5], [11]])
    positions = torch.arange(16) - documents * starts
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1) | (
        documents[:, :, None] != documents[:, None, :]
    )
    expected = theirs(ids, positions, hidden[:, None])
    torch.testing.assert_close(
        ours(ids, position_ids=positions, document_ids=documents), expected, rtol=1e-5, atol=1e-5
    )
