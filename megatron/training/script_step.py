"""A script's forward_step in Megatron's form: it is called with (data_iterator, model) and returns
(output of the model, loss_func)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.config.script import Script
    from megatron.model.gpt import GPTModel
    from megatron.training.batch import Batch
    from megatron.training.step import ForwardStep, Losses


current: dict[str, Any] = {}  # the micro-batch that a script's forward_step is called with


def as_batch_step(script: Script) -> ForwardStep:
    """Its `forward_step` as the step calls it, with (batch, model).

    One whose first parameter is named batch is returned as it is. Any other has Megatron's form: it
    takes an iterator, which gives the micro-batch as a dictionary (`micro_batch`), and a model, and
    returns (output, loss_func). A GPT is called as Megatron's (`ScriptModel`), any other model as
    it is. On the last pipeline
    stage `loss_func(output)` returns (mean loss, report) or (sum of losses, number of tokens,
    report). What a report calls "lm loss" is logged in place of the loss that is trained on.
    """
    step = script.forward_step
    assert step is not None
    if next(iter(inspect.signature(step).parameters), None) != "batch":
        step = functools.partial(_call, step)
    return step if script.model_provider is None else functools.partial(_of_own_model, step)


def _of_own_model(step: ForwardStep, batch: Batch, model: GPTModel) -> Losses | torch.Tensor:
    """Modules that are not of the suite know dropout by `training`, and by torch's random numbers:
    here they are a function of seed, iteration, micro-batch and data-parallel rank."""
    import torch

    seeds = batch.dropout_seeds  # None in evaluations
    if model.training != (seeds is not None):
        model.train(seeds is not None)
    if seeds is not None:
        torch.manual_seed(seeds.seed(-1, "torch"))
    return step(batch, model)


def _call(forward_step: Callable[..., Any], batch: Batch, model: GPTModel) -> Losses | torch.Tensor:
    from megatron.model.gpt import GPTModel

    tensors = micro_batch(batch)
    current.update(tensors)
    is_gpt = isinstance(model, GPTModel)
    returned = forward_step(_once(tensors), ScriptModel(model, batch, tensors) if is_gpt else model)
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        raise ValueError(
            "forward_step: returned no (output, loss_func); name its first parameter batch if it "
            "returns losses [forward-step-result]"
        )
    output, loss_func = returned
    if is_gpt and model.output_layer is None:
        return output
    return _losses(loss_func(output), batch)


def _losses(returned: Any, batch: Batch) -> tuple[Any, Any, dict[str, Any]]:
    """(sum of losses, number of tokens, metrics) from what loss_func returned."""
    match returned:
        case loss, Mapping() as report:
            # The mean over a micro-batch, each of which counts alike: as many tokens as it has.
            tokens = batch.tokens.numel()
            loss = loss * tokens
        case loss, tokens, Mapping() as report:
            pass
        case _:
            raise ValueError(
                "loss_func: returned neither (loss, dict) nor (sum of losses, number of tokens, "
                "dict) [forward-step-result]"
            )
    return loss.sum(), tokens, {name: _metric(value) for name, value in report.items()}


def _metric(value: Any) -> Any:
    """A pair (sum, count) is in Megatron's reports a tensor [2]."""
    if getattr(value, "shape", None) == (2,):
        return value[0], value[1]
    return value


def _once(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tensors
    raise ValueError(
        "forward_step: took a second micro-batch from data_iterator; it is called once for each "
        "[one-micro-batch]"
    )


def micro_batch(batch: Batch) -> dict[str, torch.Tensor | None]:
    """Megatron's names and forms: `tokens`, `labels`, `position_ids` int64 and `loss_mask` fp32,
    [b, s] each (with context parallelism this rank's s/cp); `attention_mask`, bool [b, 1, s, s]
    with True where nothing is seen, or None where attention is plainly causal or the sequence is
    split."""
    tokens = batch.tokens
    loss_mask, position_ids = batch.loss_mask, batch.position_ids
    if loss_mask is None:
        loss_mask = tokens.new_ones(tokens.shape).float()
    if position_ids is None:
        position_ids = tokens.new_ones(tokens.shape).cumsum(1) - 1
    attention_mask = None
    ids = batch.document_ids
    if ids is not None and ids.shape == tokens.shape:
        causal = ids.new_ones(2 * ids.shape[1:]).tril().bool()
        attention_mask = ~(causal & (ids[:, None, :, None] == ids[:, None, None, :]))
    return {
        "tokens": tokens,
        "labels": batch.labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "position_ids": position_ids.expand_as(tokens),
    }


class ScriptModel:
    """A chunk of the GPT, called as Megatron's model; anything else of it is the chunk's.

    What Megatron's call does not have comes from the micro-batch: hidden states of the stage
    before, dropout, the routers' exchange.
    """

    def __init__(self, model: GPTModel, batch: Batch, fields: Mapping[str, Any]):
        self._model = model
        self._batch = batch
        self._fields = fields

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input: None = None,
        labels: torch.Tensor | None = None,
        *,
        loss_mask: torch.Tensor | None = None,
        **kwargs: None,
    ) -> torch.Tensor:
        """Per-token losses [b, s] with labels, else logits [b, s, vocabulary]; of a chunk before
        the last, hidden states. `loss_mask` is for loss_func. Raises ValueError for an attention
        mask other than the micro-batch's, and for arguments that the GPT has not."""
        if attention_mask is not None and attention_mask is not self._fields["attention_mask"]:
            raise ValueError(
                "model: attention is causal, with --reset-attention-mask inside documents; pass "
                "the attention_mask of the micro-batch or None [attention-mask-given]"
            )
        for name, value in {"decoder_input": decoder_input, **kwargs}.items():
            if value is not None:
                raise ValueError(
                    f"model: {name} has no effect here; leave it out [no-such-argument]"
                )
        batch = self._batch
        if position_ids is None or position_ids is self._fields["position_ids"]:
            position_ids = batch.position_ids
        output = self._model(input_ids, position_ids, labels=labels, **batch.extras)
        # scripts take a flat view of losses, as Megatron's allow
        return output if labels is None else output.contiguous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
