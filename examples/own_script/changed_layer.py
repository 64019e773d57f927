"""Pretrain the GPT of the flags with another MLP in layer 0: a bilinear one of plain torch."""

from functools import partial

from torch import nn

from megatron.training import GPTModel, ModelType, get_args, pretrain


class Bilinear(nn.Module):
    """(A x) * (B x) in place of an activation; x [s, b, hidden], alike on tensor-parallel ranks."""

    def __init__(self, hidden, width):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * width), nn.Linear(width, hidden)
        for p in self.parameters():
            # with --sequence-parallel a rank sees part of the tokens: the gradient is summed
            p.sequence_parallel = True
            nn.init.normal_(p, std=0.02)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        return self.down(a * b)


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    model = GPTModel(pre_process=pre_process, post_process=post_process)
    model.decoder.layers["0"].mlp = Bilinear(args.hidden_size, args.ffn_hidden_size)
    return model


def loss_func(loss_mask, losses):
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss, tokens, {"lm loss": (loss.detach(), tokens)}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids = next(data_iterator).values()
    losses = model(tokens, position_ids, attention_mask, labels=labels)
    return losses, partial(loss_func, loss_mask)


if __name__ == "__main__":
    pretrain(None, model_provider, ModelType.encoder_or_decoder, forward_step)
