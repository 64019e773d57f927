"""The iteration line of --log-format aurora (AuroraGPT's), and its two counts of FLOPs."""

from __future__ import annotations

from datetime import datetime

from megatron.config.model import ModelConfig
from megatron.model.blocks.attention.facts import Attention
from megatron.training.logging.iteration import Interval
from megatron.training.logging.line_format import LineFormat
from megatron.training.result import IterationResult


def aurora_lm_flops_per_token(m: ModelConfig, padded_vocab_size: int) -> int:
    """[LM]TFLOPs of the aurora log dialect: 12 L h^2 (1 + 1.5 f/h + kv/H + s/h + V/2Lh); f counted
    as gated.

    Full attention, no recompute; equals `count_flops(...).model` of a gated
    model.
    """
    h = m.hidden_size
    layers = m.num_layers
    keys = h // _heads_per_group(m)
    attention = 12 * layers * h * (h + keys + m.seq_length)
    return attention + 18 * layers * h * m.ffn + 6 * h * padded_vocab_size


def aurora_ds_flops_per_token(m: ModelConfig, padded_vocab_size: int, full_recompute: bool) -> int:
    """[DS]TFLOPs of the aurora log dialect: 2 x (4 with full recompute, else 3) x multiply-adds per
    token.

    Kept with its quirk: keys and values count 2 // (heads per group) squares of h, which is 0 from
    3 heads per group on.
    """
    h = m.hidden_size
    per_layer = (2 + 2 // _heads_per_group(m)) * h * h + 2 * m.seq_length * h + 3 * m.ffn * h
    return 2 * (4 if full_recompute else 3) * (m.num_layers * per_layer + padded_vocab_size * h)


def _heads_per_group(m: ModelConfig) -> int:
    asked = Attention(m).attention(1)
    return asked["heads"] // asked["groups"]


def aurora_line(
    result: IterationResult,
    i: Interval,
    *,
    train_iters: int,
    seq_length: int,
    world_size: int,
    lm_teraflops: float,
    ds_teraflops: float,
    now: datetime,
) -> str:
    """AuroraGPT's key=value line of interval `i` with its two counts; loss and gradient norm are
    omitted where there is none."""
    vetoes = sum(counts.total() for counts in i.vetoes.values())
    skipped = i.overflow_skips + i.user_skips + vetoes
    fields = [
        f"iteration={result.iteration:8d}/{train_iters:8d}",
        f"consumed_samples={result.consumed_samples:12d}",
        f"consumed_tokens={result.consumed_samples * seq_length:12d}",
        f"elapsed_time_per_iteration_ms={i.milliseconds:.1f}",
        f"learning_rate={result.learning_rate:.6g}",
        f"global_batch_size={result.global_batch_size:5d}",
    ]
    if i.losses:
        fields.append(f"lm loss={i.loss:.6f}")
    fields += [f"{name}={value:.6g}" for name, value in i.metrics.items()]
    fields.append(f"loss_scale={result.loss_scale:.1f}")
    if result.line_norm is not None:
        fields.append(f"grad_norm={result.line_norm:.3f}")
    fields += [
        f"actual_seqlen={seq_length:5d}",
        f"number_of_skipped_iterations={skipped:3d}",
        f"number_of_nan_iterations={i.nan_iterations:3d}",
    ]
    if i.trained and i.seconds > 0:
        rate = i.samples / i.seconds
        fields += [
            f"samples_per_second={rate:.3f}",
            f"tokens_per_gpu_per_second_tgs={rate * seq_length / world_size:.3f}",
            f"[LM]TFLOPs={lm_teraflops:.2f}",
            f"[DS]TFLOPs={ds_teraflops:.2f}",
        ]
    return f"[{now:%Y-%m-%d %H:%M:%S.%f}][INFO][training_log:661] - " + " | ".join(fields) + " |"


class AuroraLines(LineFormat):
    """--log-format aurora."""

    def _text(self, result: IterationResult, interval: Interval, teraflops: float | None) -> str:
        m = self._config.model
        vocab = self.plan.padded_vocab_size
        tokens = interval.samples * m.seq_length
        full = self._config.training.recompute == "full"
        lm = aurora_lm_flops_per_token(m, vocab) * tokens
        ds = aurora_ds_flops_per_token(m, vocab, full) * tokens
        return aurora_line(
            result,
            interval,
            train_iters=self.plan.train_iters,
            seq_length=m.seq_length,
            world_size=self.plan.world_size,
            lm_teraflops=self._rate(lm, interval.seconds),
            ds_teraflops=self._rate(ds, interval.seconds),
            now=datetime.now(),
        )
