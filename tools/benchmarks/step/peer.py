"""megatron-core's GPT on gloo ranks of a CPU, as a contestant of the layout benchmark.

megatron-core asks for CUDA in a few places even on a CPU; they are patched here, and its fusions,
which need CUDA, are off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
from sizes import BETAS, LEARNING_RATE, WEIGHT_DECAY, Size
from torch import nn


def _patch_for_cpu() -> None:
    mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")).start()
    utils.GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, name, mem_alloc_context=None: (
        torch.empty(shape, dtype=dtype)
    )
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


class MegatronCore:
    """Its model of a llama size in a bare fp32 loop: micro-batches in memory, fused AdamW, no
    clipping and no log.

    Tensor-parallel over the ranks of the launcher in `environ`. First weights and samples are its
    own, so its losses are not those of the others.
    """

    def __init__(self, size: Size, environ: Mapping[str, str]):
        _patch_for_cpu()
        rank = int(environ["RANK"])
        ranks = int(environ["WORLD_SIZE"])
        store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), ranks, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(ranks)
        torch.manual_seed(1)
        config = TransformerConfig(
            tensor_model_parallel_size=ranks,
            num_layers=size.layers,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            ffn_hidden_size=size.ffn_size,
            gated_linear_unit=True,
            activation_func=F.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=size.vocab,
            max_sequence_length=size.seq,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        samples = torch.randint(
            0,
            size.vocab,
            (size.micro_batches, size.micro_batch, size.seq + 1),
            generator=torch.Generator().manual_seed(2),
        )
        self.samples = samples
        self.positions = torch.arange(size.seq).expand(size.micro_batch, -1)
        self.mask = torch.ones(size.seq, size.seq, dtype=torch.bool).triu(1)[None, None]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank."""
        return self.model.parameters()

    def step(self) -> float:
        """One step; its loss."""
        total = 0.0
        for samples in self.samples:
            tokens = samples[:, :-1].contiguous()
            labels = samples[:, 1:].contiguous()
            losses = self.model(tokens, self.positions, self.mask, labels=labels)
            loss = losses.float().mean() / len(self.samples)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total
