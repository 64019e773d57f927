"""Activation memory of a parallel layout, by formula.

After Korthikanti et al. 2022, but of what this suite's kernels keep for backward (attention keeps
no scores, dropout no masks). Tests measure it in real runs.
"""

from __future__ import annotations

import re
from itertools import accumulate, islice
from typing import NamedTuple

from megatron.config.plan.parameter_spec import ParameterSpec
from megatron.config.plan.parameters import MTP_PREFIX, count_parameters, head_weight
from megatron.config.plan.plan import BYTES, Plan, fp8_layers, rank_axes
from megatron.config.tree import Config

IDS = 8  # bytes of a token id
# Logits that the loss takes at a time, on a CPU and elsewhere (kernels/cross_entropy.py).
LOSS_BLOCKS = (1 << 19, 1 << 26)
# Matrices whose input the core, another matrix or a router keeps, too.
_KEPT_ELSEWHERE = re.compile(
    r"(\.linear_proj|q_down_proj|\.experts\.\w+|shared_experts\.linear_fc1)\.weight$"
)


class MicroBatchSizes:
    """Sizes of one micro-batch on one rank. tokens: this rank's; rows: of them what sequence
    parallelism leaves."""

    def __init__(self, config: Config, plan: Plan):
        m = config.model
        p = config.parallel
        self.config = config
        self.tp = p.tensor_model_parallel_size
        self.cp = p.context_parallel_size
        self.pp = p.pipeline_model_parallel_size
        self.sequence = p.sequence_parallel and self.tp > 1
        self.tokens = m.seq_length // self.cp * config.training.micro_batch_size
        self.rows = self.tokens // self.tp if self.sequence else self.tokens
        self.etp = p.expert_tensor_parallel
        own_tokens = self.sequence or self.tp == 1
        self.expert_tokens = self.rows * self.etp if own_tokens else self.tokens
        self.itemsize = BYTES[config.precision.params_dtype]
        self.wide = max(4, self.itemsize)
        self.residual = self.wide if m.fp32_residual_connection else self.itemsize
        self.hidden = m.hidden_size
        self.vocab = plan.padded_vocab_size // self.tp
        head = head_weight(m)
        self.trains_head = not any(spec.frozen for spec in plan.parameters if spec.name == head)
        self.loss = 2 if config.precision.fp16_lm_cross_entropy else self.wide
        # Row-blocked kernels keep less than torch's own.
        self.on_cpu = config.training.on_cpu
        # The C++, where it is built: it widens nothing.
        self.native = self.on_cpu and config.precision.params_dtype in ("float32", "bfloat16")

    def norm(self, rows: int, width: int, itemsize: int) -> int:
        """What a norm keeps of its input (of `itemsize` bytes an element) and of its statistics."""
        m = self.config.model
        layer_norm = m.normalization == "LayerNorm"
        if m.apply_layernorm_1p and (layer_norm or not self.on_cpu):
            itemsize = max(itemsize, self.wide)
        # mean and inverse deviation; of RMSNorm the latter, which the CPU computes again
        statistics = 2 if layer_norm else int(not self.on_cpu)
        return rows * (width * itemsize + self.wide * statistics)

    def linear_backward(self, outputs: int, inputs: int) -> int:
        """The gradients of a column-parallel layer's weight (before it is added to that of other
        micro-batches, in another dtype) and input, and its gathered input."""
        p = self.config.precision
        weight = inputs * (0 if self.on_cpu or p.params_dtype == p.grad_dtype else outputs)
        gathered = self.tokens + self.rows if self.sequence else 0
        return self.itemsize * (weight + (self.tokens + gathered) * inputs)

    def matrix_input(self, spec: ParameterSpec) -> int:
        """Bytes of its input that a frozen matrix does not keep, and nothing else."""
        plain = not (self.config.training.recomputed_modules or self.config.precision.fp8)
        if not (plain and spec.frozen and spec.matrices) or _KEPT_ELSEWHERE.search(spec.name):
            return 0
        rows = self.tokens if ("tp", 1) in spec.splits else self.rows
        return rows * spec.local_shape({"tp": self.tp})[-1] * self.itemsize

    def head(self) -> int:
        """Final norm, output layer and loss: above all the logits."""
        nbytes = self.norm(self.rows, self.hidden, self.residual)
        nbytes += self.rows * self.hidden * self.itemsize * self.trains_head
        nbytes += self.tokens * (self.vocab * self.itemsize + IDS + self.loss)
        return nbytes + (self.tokens * (1 + self.loss) if self.tp > 1 else 0)

    def loss_scratch(self) -> int:
        """What the loss holds while it runs: a block of logits in its own dtype, and of the slopes
        of their cap; nothing where one kernel computes it (C++, or Triton on CUDA)."""
        capped = self.config.model.final_logit_softcapping is not None
        if not capped and (self.native or not self.on_cpu and self.loss == 4):
            return 0
        rows = max(1, LOSS_BLOCKS[not self.on_cpu] // self.vocab)
        return min(rows, self.tokens) * self.vocab * self.loss * (1 + capped)

    def embedding_backward(self) -> int:
        """The gradients of the embedding's results and, where they are not summed in fp32 by row,
        of its whole matrix, before it is added."""
        rows = self.tokens * (self.wide + (self.itemsize if self.itemsize < self.wide else 0))
        if self.config.precision.grad_dtype in ("bfloat16", "float16"):
            rows += self.vocab * self.wide
        return rows * self.hidden


class Activations(NamedTuple):
    """Bytes of activations of a rank at its peak: `stored` between forward and backward, by `alive`
    (micro-batch, chunk) pairs, and FP8 copies of weights; `head`: final norm, logits and loss of
    one micro-batch; `recomputed`: layers that are computed a second time; `moving`: hidden states
    and gradients that travel between stages; `backward`: the most that backward holds of head or
    recomputed layers, and gradients."""

    stored: int
    alive: int
    head: int
    recomputed: int
    moving: int
    backward: int

    @property
    def after_forward(self) -> int:
        """The most after a forward."""
        return self.stored + self.head + self.moving

    @property
    def total(self) -> int:
        """The most in a step, which is in backward."""
        return self.stored + self.moving + self.backward


def chunk_activations(config: Config, plan: Plan, layers: range) -> int:
    """Bytes that these layers of one micro-batch keep between forward and backward; nothing of what
    comes before all trained weights, unless its input is from another stage and has a gradient."""
    sizes = MicroBatchSizes(config, plan)
    runs = config.training.recomputed_runs(len(layers))
    begins = layers == plan.layers_per_stage[0][0]
    first = plan.first_trained if begins else 0
    kept = layers[max(sum(runs), first) :]
    counts = config.model.layer_counts(kept).items()
    nbytes = sum(count * spec.saved(sizes) for spec, count in counts)
    nbytes -= sum(sizes.matrix_input(p) for p in plan.parameters if p.layer in kept)
    if begins and first in kept and "mlp" in plan.trained[0].name:
        mixer = config.model.layer(first).mixer
        nbytes -= sizes.norm(sizes.rows, sizes.hidden, sizes.residual)
        nbytes -= mixer.saved(sizes) if mixer else 0
    inputs = sum(end > first for end in accumulate(runs))
    return nbytes + inputs * sizes.rows * sizes.hidden * sizes.residual


def embedding_activations(config: Config, plan: Plan) -> int:
    """Bytes that the embedding of one micro-batch keeps: which tokens' rows are this rank's."""
    sizes = MicroBatchSizes(config, plan)
    return sizes.tokens * (IDS + 1) if sizes.tp > 1 and plan.parameters[0].trained else 0


def fp8_weights(config: Config, plan: Plan, stage: int, by_library: bool = False) -> int:
    """Bytes of the FP8 copies of a rank's weights: one as it is and, except on a CPU, one
    transposed. Those of kernels/fp8.py are kept during the micro-batches of a step. Transformer
    Engine's (`by_library`) are made in each forward and kept for its backward, with every
    micro-batch: its module/linear.py (2.20.2) saves what it has quantized by rows and, for the
    gradient of the input, by columns."""
    layers = fp8_layers(config, plan, stage, by_library)
    return count_parameters(layers, rank_axes(config)) * (1 if config.training.on_cpu else 2)


def activations(config: Config, plan: Plan, stage: int) -> Activations:
    """Of a rank of a pipeline stage, in the step with the most micro-batches."""
    chunks = plan.layers_per_stage[stage]
    stages = len(plan.layers_per_stage)
    largest = max(chunks, key=lambda chunk: chunk_activations(config, plan, chunk))
    micro_batches = plan.num_microbatches(plan.train_iters)
    group = config.parallel.microbatch_group_size_per_vp_stage
    pipeline = (stage, stages, micro_batches, len(chunks), group)
    alive, moving = 1, 0
    if stages > 1:
        from megatron.config.plan.schedules import activations_alive, messages_waiting

        alive = activations_alive(*pipeline)
        moving = messages_waiting(*pipeline, config.parallel.overlap_p2p_comm)
    micro_batch = chunk_activations(config, plan, largest) + (
        embedding_activations(config, plan) if stage == 0 else 0
    )
    runs = config.training.recomputed_runs(len(largest))
    sizes = MicroBatchSizes(config, plan)
    specs = list(map(config.model.layer, largest))
    saved = (spec.saved(sizes) for spec in specs)
    recomputed = max((sum(islice(saved, run)) for run in runs), default=0)
    copies = fp8_weights(config, plan, stage, by_library=True) // max(1, sum(map(len, chunks)))
    micro_batch += copies * (len(largest) - sum(runs))
    recomputed += copies * max(runs, default=0)
    recomputed = max(recomputed, *(spec.recomputed(sizes) for spec in specs), 0)
    head = behind = 0
    first, final, last = (any(chunk[i] for chunk in plan.chunks(stage)) for i in (1, 2, 3))
    if final:
        specs += map(config.model.layer, plan.behind)
        behind = sum(config.model.layer(number).saved(sizes) for number in plan.behind)
        behind -= sum(sizes.matrix_input(p) for p in plan.parameters if MTP_PREFIX in p.name)
    if last:
        head = (1 + len(plan.behind)) * sizes.head() + behind
    else:
        micro_batch += behind
    backward = recomputed + max((spec.backward(sizes) for spec in specs), default=0)
    if head:
        more = max(sizes.linear_backward(sizes.vocab, sizes.hidden), sizes.loss_scratch())
        backward = max(backward, head + more)
    if first and plan.parameters[0].trained:  # its layers' activations are freed by then
        backward = max(backward, sizes.embedding_backward() - micro_batch)
    moving *= sizes.rows * sizes.hidden * sizes.residual
    if final != last:  # those of the layers behind the decoder, too
        moving *= 1 + len(plan.behind)
    stored = alive * micro_batch + fp8_weights(config, plan, stage)
    return Activations(stored, alive, head, recomputed, moving, backward)
