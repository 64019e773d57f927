"""A run of this suite, from its flags, as the formulas take it."""

from __future__ import annotations

from megatron.config.plan.plan import Plan, shards
from megatron.config.tree import Config

from .machines import Machine
from .step_time import Runs

NATURAL = (
    1.5  # the fullest rank of experts, of the mean, without forced balance: measured 1.1 to 2.2
)


def sizes(config: Config, plan: Plan, machine: Machine) -> Runs:
    """Model, layout and program of the run on this machine."""
    m, p, t = config.model, config.parallel, config.training
    numbers = range(m.mtp_layers.stop)
    mixers = [mixer.attention(1) for n in numbers if (mixer := m.layer(n).mixer)]
    attention = next(filter(None, mixers), {"head_dim": m.head_dim, "value_dim": m.head_dim})
    seen = [each.get("window") or m.seq_length for each in mixers]
    keys = sum(width * (1 - width / 2 / m.seq_length) for width in seen) / max(1, len(seen))
    experts = m.num_experts or 0
    latent = m.multi_latent_attention
    chunks = [chunk for stage in plan.layers_per_stage for chunk in stage]
    again = sum(sum(t.recomputed_runs(len(chunk))) for chunk in chunks) / m.num_layers
    stage = int(p.shares_optimizer) + p.shares_gradients + p.shares_weights
    node = int(machine.facts["node"])
    micro = t.micro_batch_size
    return Runs(
        layers=len(numbers),
        losses=1 + len(m.mtp_layers),
        hidden=m.hidden_size,
        heads=m.num_attention_heads,
        groups=m.query_groups,
        head_dim=attention["head_dim"],
        value_dim=attention["value_dim"],
        ffn=m.ffn,
        gated=int(m.gated),
        vocab=plan.padded_vocab_size,
        tied=int(m.tied),
        experts=experts,
        topk=m.moe_router_topk if experts else 0,
        moe_ffn=m.expert_ffn if experts else 0,
        shared_ffn=(m.moe_shared_expert_intermediate_size or 0) if experts else 0,
        dense_layers=sum(not m.is_moe_layer(n) for n in numbers) if experts else 0,
        q_rank=(m.q_lora_rank or 0) if latent else 0,
        kv_rank=m.kv_lora_rank if latent else 0,
        seq=m.seq_length,
        keys=keys,
        batch=plan.global_batch_size(plan.train_iters),
        micro=micro,
        tp=p.tensor_model_parallel_size,
        pp=p.pipeline_model_parallel_size,
        vpp=len(plan.layers_per_stage[0]),
        cp=p.context_parallel_size,
        ep=p.expert_model_parallel_size,
        etp=p.expert_tensor_parallel if experts else 1,
        dp=plan.data_parallel_size,
        zero=stage,
        shard=shards(config, plan) if stage else 1,
        again=again,
        precision=int(config.precision.fp8 is not None),
        element={"float64": 8, "float32": 4}.get(config.precision.params_dtype, 2),
        grad_bytes=2 if config.precision.grad_dtype in ("bfloat16", "float16") else 4,
        node=node,
        network=machine.facts["network_bytes"],
        eager=0.8 if config.training.torch_compile else 1.0,
        balanced=p.account_for_loss_in_pipeline_split
        * (3 if p.account_for_embedding_in_pipeline_split else 1),
        messages=0.2,
        frozen=sum(demands.other_flops(plan) for demands in config.demands) / m.seq_length,
        sequence=int(p.sequence_parallel),
    )
