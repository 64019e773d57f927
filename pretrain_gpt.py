"""Pretrain a GPT, from the command line to the last evaluation. `forward_step` is what a researcher
edits, or gives to `main` in a script of their own; `megatron/program.py` is what happens then."""

from megatron.program import ModelType, pretrain


def forward_step(batch, model):
    """Loss of one micro-batch: (sum over its tokens that count, number of these tokens, metrics).

    `metrics` are averaged over the global batch and logged with the loss: by name a tensor, whose
    mean it is, or a pair (sum, count). On pipeline stages before the last: the hidden states for
    the next stage.
    """
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, **batch.extras)
    if model.output_layer is None:
        return output
    losses = output
    metrics: dict = {}
    if batch.loss_mask is None:
        return losses.sum(), losses.numel(), metrics
    return (losses * batch.loss_mask).sum(), batch.loss_mask.sum(), metrics


def main(argv=None, *, forward_step=forward_step, extra_args_provider=None, services=None):
    """The program; with `argv` a caller's own command line, whose streams and signals stay the
    caller's. `extra_args_provider`, `services`: see `pretrain`."""
    pretrain(
        None,
        None,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=extra_args_provider,
        argv=argv,
        services=services,
    )


if __name__ == "__main__":
    main()
