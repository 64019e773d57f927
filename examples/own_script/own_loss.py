"""Pretrain with a loss and flags of one's own: cross entropy, and the square of log Z (z-loss)."""

from functools import partial

from megatron.training import ModelType, get_args, pretrain


def add_args(parser):
    group = parser.add_argument_group("z-loss")
    group.add_argument(
        "--z-loss-coeff", type=float, default=1e-4, help="weight of the mean of (log Z)^2"
    )


def loss_func(labels, loss_mask, logits):
    logits = logits.float()
    log_z = logits.logsumexp(-1)
    losses = log_z - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    lm_loss = (losses * loss_mask).sum()
    z_loss = (log_z.square() * loss_mask).sum()
    tokens = loss_mask.sum()
    report = {"lm loss": (lm_loss.detach(), tokens), "z loss": (z_loss.detach(), tokens)}
    return lm_loss + get_args().z_loss_coeff * z_loss, tokens, report


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return logits, partial(loss_func, batch["labels"], batch["loss_mask"])


if __name__ == "__main__":
    pretrain(None, None, ModelType.encoder_or_decoder, forward_step, extra_args_provider=add_args)
