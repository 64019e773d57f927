"""Checkpoints of megatron-core's GPTModel, written by its ranks on CPUs, for the converter's tests;
imports it inside functions only."""

from __future__ import annotations

import argparse
import json
import multiprocessing.dummy
import os
import random
import re
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron.addons.convert.tests.argument_sets import CORE_016, arguments_of
from megatron.inference.load_model import open_trained_model
from tests.core.model.tiny import tiny_config, tiny_model
from tests.peers.megatron_core_models import let_it_run_on_a_cpu, mcore_model

VOCAB = 64
SIZE = dict(
    hidden_size=64, num_attention_heads=8, num_layers=4, seq_length=16, max_position_embeddings=32
)
LLAMA = dict(
    position_embedding_type="rope",
    swiglu=True,
    ffn_hidden_size=96,
    normalization="RMSNorm",
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
)
LATENT = LLAMA | dict(
    multi_latent_attention=True,
    group_query_attention=False,
    num_query_groups=1,
    kv_lora_rank=20,
    qk_head_dim=12,
    qk_pos_emb_head_dim=8,
    v_head_dim=10,
)
YARN = dict(
    rotary_scaling_factor=8.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3
)
MODELS = {
    "gpt2": {},
    "llama": LLAMA,
    "llama tied, qkv bias": LLAMA
    | dict(untie_embeddings_and_output_weights=False, add_qkv_bias=True),
    "swiglu with biases, qk norm": dict(swiglu=True, ffn_hidden_size=96, qk_layernorm=True),
    "latent attention": LATENT | dict(q_lora_rank=24, qk_layernorm=True, **YARN),
    "latent attention, queries of hidden states": LATENT,
    "multi-token prediction": LLAMA | dict(mtp_num_layers=2),
    "multi-token prediction, tied": LLAMA
    | dict(mtp_num_layers=1, untie_embeddings_and_output_weights=False),
}


class Call:
    """Unpickles as a call of os.system."""

    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


def stacked_tensors(flags) -> dict[str, torch.Tensor]:
    """Our dense model's weights under Megatron's names, layers stacked."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    model = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        parts = name.split(".")
        if not name.startswith("decoder.layers."):
            found[name] = value
            continue
        gated = ".linear_fc1." in name and bool(flags.get("swiglu"))
        value = value.flatten(0, 1) if gated else value
        stacks.setdefault(".".join(parts[:2] + parts[3:]), []).append(value)
    return found | {name: torch.stack(values) for name, values in stacks.items()}


def write_torch_dist(folder, flags, tensors, root, **changes):
    """A torch_dist checkpoint of these tensors and objects, with `root` in common.pt; `changes` are
    arguments."""
    folder.mkdir()
    dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    args = arguments(flags)
    vars(args).update({"num_experts": flags.get("num_experts")} | changes)
    torch.save({"args": args, "checkpoint_version": 3.0} | root, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))


def unsaid(flags, folder) -> list[str]:
    """Words of megatron-import for what no release has among its arguments."""
    name = "original_max_position_embeddings"
    if name not in flags:
        return []
    (folder / "args").write_text(f"--original-max-position-embeddings {flags[name]}")
    return ["--args", str(folder / "args")]


IDS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))


def arguments(flags, tp=1, pp=1) -> argparse.Namespace:
    """What Megatron-LM saves of its command line."""
    own = dict(
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        tokenizer_type="NullTokenizer",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.float32,
    )
    return argparse.Namespace(**arguments_of(CORE_016, tiny_config(**SIZE, **flags), **own))


def on_a_rank(rank, world, flags, tp, pp, folder):
    """Save this rank's part of megatron-core's model as Megatron-LM does; returns the logits of the
    whole model, which every rank builds first. Its weights are the same in every layout."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder) + ".store", 1), rank=0, world_size=1
        )
    patch = pytest.MonkeyPatch()
    let_it_run_on_a_cpu(patch)
    # of a tied embedding on two stages
    patch.setattr(torch.Tensor, "cuda", lambda self, *args, **more: self)
    hidden = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    with torch.no_grad():
        # its heads want labels
        plain = built(flags | dict(mtp_num_layers=None), 1, 1)
        logits = plain(IDS, torch.arange(16).expand(2, 16), hidden)
    parallel_state.destroy_model_parallel()
    model = built(flags, tp, pp)
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}" + (
        f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    )
    target = folder / "iter_0000007" / name
    target.mkdir(parents=True)
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    torch.save(
        {
            "args": arguments(flags, tp, pp),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "rng_state": [rng],
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
        },
        target / "model_optim_rng.pt",
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return logits


def built(flags, tp, pp):
    """megatron-core's model, this rank's part of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    parallel_state.initialize_model_parallel(tp, pp)
    kind = MLATransformerConfig if flags.get("multi_latent_attention") else TransformerConfig
    plain_model = GPTModel.__init__
    plain_config = kind.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GPTModel,
            "__init__",
            lambda *args, **more: plain_model(
                *args,
                **more,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            ),
        )
        patch.setattr(
            kind,
            "__init__",
            lambda *args, **more: plain_config(
                *args,
                **more
                | dict(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    pipeline_dtype=torch.float32,
                ),
            ),
        )
        model = mcore_model(tiny_config(**SIZE, **flags)).eval()
    fill(model, flags, tp, pp, parallel_state)
    return model


def fill(model, flags, tp, pp, state):
    """Give this rank its parts of the weights of one model, cut by megatron-core's own marks of
    what is split where."""
    ours = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    whole = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    t = state.get_tensor_model_parallel_rank()
    p = state.get_pipeline_model_parallel_rank()
    biases = [one for one in model.named_buffers() if one[0].endswith(".expert_bias")]
    for name, parameter in (*model.named_parameters(), *biases):
        key = name
        if name.startswith("decoder.layers."):
            head, _, tail = name.partition(".layers.")
            number, _, rest = tail.partition(".")
            key = f"{head}.layers.{int(number) + p * SIZE['num_layers'] // pp}.{rest}"
        expert = re.search(r"\.local_experts\.(\d+)\.", key)
        if expert:
            key = key.replace(expert[0], ".")
        if key == "output_layer.weight" and key not in whole:
            key = "embedding.word_embeddings.weight"
        value = whole[key]
        if expert:  # experts are split over tensor-parallel ranks as an MLP is
            value = value[int(expert[1])]
            dim = 1 if ".linear_fc1." in key else 1
            value = value.chunk(tp, dim=dim)[t]
            value = value.flatten(0, 1) if ".linear_fc1." in key else value
            with torch.no_grad():
                parameter.copy_(value)
            continue
        # gate and up: each rank has its rows of both
        if ".linear_fc1." in key and flags.get("swiglu"):
            value = value.chunk(tp, dim=1)[t].flatten(0, 1)
        elif getattr(parameter, "tensor_model_parallel", False):
            value = value.chunk(tp, dim=parameter.partition_dim)[t]
        with torch.no_grad():
            parameter.copy_(value)


def logits_of(folder) -> torch.Tensor:
    with torch.no_grad():
        return open_trained_model(str(folder), device="cpu").model(IDS)


def assert_is_the_model(folder, flags):
    """The converted model has the weights of `tiny_model`, and its logits."""
    ours = open_trained_model(str(folder), device="cpu").model
    whole = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    assert ours.state_dict().keys() == whole.state_dict().keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


def sharded(model, metadata=None):
    """Its state, as Megatron-LM asks for it."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group(dict(metadata or {}))
    return model.sharded_state_dict(metadata=metadata)


def load_torch_dist_on_a_rank(rank, world, flags, tp, pp, folder):
    """Load a torch_dist folder into megatron-core's model by its loader, which fails at any key
    that is missing or unexpected; every weight must be the one that `built` fills in."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    patch = pytest.MonkeyPatch()
    let_it_run_on_a_cpu(patch)
    patch.setattr(torch.Tensor, "cuda", lambda self, *args, **more: self)
    model = built(flags, tp, pp)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    wanted = {"model": sharded(model)}
    strict = StrictHandling.RAISE_ALL
    found = dist_checkpointing.load(wanted, str(folder), strict=strict)
    model.load_state_dict(found["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert found["args"].num_layers == SIZE["num_layers"]
    parallel_state.destroy_model_parallel()


def on_a_rank_torch_dist(rank, world, flags, tp, pp, folder, metadata):
    """Save megatron-core's model by its dist_checkpointing, as Megatron-LM does with --ckpt-format
    torch_dist; writers are threads instead of processes."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    patch = pytest.MonkeyPatch()
    let_it_run_on_a_cpu(patch)
    patch.setattr(torch.Tensor, "cuda", lambda self, *args, **more: self)
    patch.setattr(torch.cuda, "synchronize", lambda *args: None)
    # it would ask psutil, which need not be installed
    patch.setattr(filesystem_async, "_process_memory", lambda: 0)
    threads = types.SimpleNamespace(get_context=lambda kind: multiprocessing.dummy)
    patch.setattr(filesystem_async, "mp", threads)
    model = built(flags, tp, pp)
    state = {
        "args": arguments(flags, tp, pp),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": sharded(model, metadata),
    }
    target = folder / "iter_0000007"
    if rank == 0:
        target.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    parallel_state.destroy_model_parallel()
