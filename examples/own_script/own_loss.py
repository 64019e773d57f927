"""Pretrain with a loss and flags of one's own: cross entropy, less a share of the entropy of what
is predicted (Pereyra et al. 2017)."""

from functools import partial

from megatron.training import ModelType, get_args, pretrain


def add_args(parser):
    group = parser.add_argument_group("confidence penalty")
    group.add_argument(
        "--entropy-coeff", type=float, default=0.1, help="weight of the mean entropy, in nats"
    )


def loss_func(labels, loss_mask, logits):
    log_p = logits.float().log_softmax(-1)
    losses = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    lm_loss = (losses * loss_mask).sum()
    entropy = -((log_p.exp() * log_p).sum(-1) * loss_mask).sum()
    tokens = loss_mask.sum()
    report = {"lm loss": (lm_loss.detach(), tokens), "entropy": (entropy.detach(), tokens)}
    return lm_loss - get_args().entropy_coeff * entropy, tokens, report


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return logits, partial(loss_func, batch["labels"], batch["loss_mask"])


if __name__ == "__main__":
    pretrain(None, None, ModelType.encoder_or_decoder, forward_step, extra_args_provider=add_args)
