"""What the step benchmark races: our whole step, and a bare torch loop around a bare model or one of transformers'.

Each contestant's `step()` is one whole training step and returns its loss. Knows no clock and no table.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from bare_model import BareModel
from sizes import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Size, command_line
from torch import Tensor, nn

from megatron.config import command_line as megatron_command_line
from megatron.timers import Timers
from megatron.training import build, initialize, loop
from megatron.training.metrics import IterationResult, TrainingLog, model_shape
from pretrain_gpt import forward_step

try:
    import transformers
except ImportError:
    transformers = None


class KeepingLog(TrainingLog):
    """The training log, which also keeps the last iteration's result."""

    last: IterationResult

    def add(self, result: IterationResult) -> None:
        """As TrainingLog's."""
        self.last = result
        super().add(result)


class Ours:
    """The iteration of pretrain_gpt.py, built by the functions it is built by there: samples, step, counters, log line.

    `environ` is the launcher's, where there are several ranks. `text` holds what such a run prints; `weights()` are the
    parameters by Megatron's global names.
    """

    def __init__(self, size: Size, dtype: str, device: str, extra: Sequence[str] = (),
                 environ: Mapping[str, str] | None = None):
        line = megatron_command_line.read(command_line(size, dtype, device, extra), environ or {})
        config, self.text = line.config, io.StringIO()
        with contextlib.redirect_stdout(self.text):
            tokenizer = build.make_tokenizer(config)
            plan = build.plan_run(config, line.world_size, tokenizer.vocab_size)
            assert plan.padded_vocab_size == size.vocab, (plan.padded_vocab_size, size.vocab)
            runtime = initialize.initialize(config)
            timers = Timers(config.logging.timing_log_level, initialize.synchronizer(runtime))
            self._log = KeepingLog(config, plan, timers, runtime.ctx.world)
            self.run = build.build_run(config, plan, runtime, timers, tokenizer)
            data = build.build_data(config, plan, runtime, tokenizer)
        self.shape, self.device = model_shape(config, plan), runtime.device
        self._trainer = loop.Trainer(self.run, data, forward_step, self._log, time.time())
        self._samples = self._trainer.open_training_samples()

    def step(self) -> float:
        """One iteration."""
        with contextlib.redirect_stdout(self.text):
            self._trainer.train_one(self.run.progress.iteration + 1, self._samples)
        return self._log.last.loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank."""
        return self.run.model.parameters()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the main weights (fp32), by global name."""
        kept = self.run.optimizer.tensors()
        params = {p.sharding.name: p.detach() for p in self.run.model.parameters()}
        return {name: kept.get(f"optimizer.fp32_param.{name}", p).clone() for name, p in params.items()}

    def first_samples(self, steps: int) -> list[Tensor]:
        """The micro-batches [b, s+1] of the next `steps` steps; the run itself does not move."""
        return list(itertools.islice(self._trainer.open_training_samples(),
                                     steps * self.run.plan.num_microbatches(self.run.progress.iteration + 1)))


class BareLoop:
    """A training loop as short scripts have it: fp32 weights, autocast for bf16, clipping, fused AdamW.

    `loss_of(model, tokens, labels)` is the mean loss. The micro-batches `samples` lie in memory and are used in turn:
    reading data costs this loop nothing.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], size: Size, dtype: str,
                 device: torch.device, samples: Sequence[Tensor]):
        self.model, self.loss_of, self.device = model.to(device).train(), loss_of, device
        self.micro_batches, self.bf16 = size.micro_batches, dtype == "bf16"
        self.samples = itertools.cycle([micro_batch.to(device) for micro_batch in samples])
        params = list(model.parameters())
        groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
                  {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)

    def step(self) -> float:
        """One step."""
        total = torch.zeros((), device=self.device)
        for _ in range(self.micro_batches):
            samples = next(self.samples)
            tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss_of(self.model, tokens, labels) / self.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()


def bare(size: Size, dtype: str, device: torch.device, state: dict[str, Tensor], samples: Sequence[Tensor]) -> BareLoop:
    """The bare loop around the bare model with the weights `state` (as `bare_model.megatron_to_bare` gives them)."""
    model = BareModel(size)
    model.load_state_dict(state, strict=False)
    return BareLoop(model, lambda m, tokens, labels: m(tokens, labels), size, dtype, device, samples)


def huggingface(size: Size, dtype: str, device: torch.device, state: dict[str, Tensor],
                samples: Sequence[Tensor]) -> BareLoop:
    """The same loop around transformers' GPT2LMHeadModel or LlamaForCausalLM, as fast as its options make it."""
    if size.family == "gpt":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=size.vocab, n_positions=size.seq, n_embd=size.hidden, n_layer=size.layers, n_head=size.heads,
            n_inner=size.ffn_size, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa"))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.ffn_size,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, max_position_embeddings=size.seq,
            rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
            attn_implementation="sdpa"))
    model.load_state_dict(bare_to_huggingface(state, size))

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    return BareLoop(model, loss_of, size, dtype, device, samples)


def bare_to_huggingface(state: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    """State of transformers' model from that of a BareModel."""
    gpt = size.family == "gpt"
    tops = {"words.weight": "transformer.wte.weight" if gpt else "model.embed_tokens.weight",
            "positions.weight": "transformer.wpe.weight", "head.weight": "lm_head.weight",
            "norm.weight": "transformer.ln_f.weight" if gpt else "model.norm.weight",
            "norm.bias": "transformer.ln_f.bias"}
    gpt_names = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "proj": "attn.c_proj", "fc1": "mlp.c_fc",
                 "fc2": "mlp.c_proj"}
    llama_names = {"norm1": ("input_layernorm",), "norm2": ("post_attention_layernorm",),
                   "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "proj": ("self_attn.o_proj",),
                   "fc1": ("mlp.gate_proj", "mlp.up_proj"), "fc2": ("mlp.down_proj",)}
    found = {}
    for name, value in state.items():
        if name in tops:
            found[tops[name]] = value
            continue
        _, layer, module, kind = name.split(".")
        if gpt:
            found[f"transformer.h.{layer}.{gpt_names[module]}.{kind}"] = value.t() if value.dim() == 2 else value
        else:
            parts = value.chunk(len(llama_names[module]))
            found |= {f"model.layers.{layer}.{target}.{kind}": part
                      for target, part in zip(llama_names[module], parts, strict=True)}
    return found
