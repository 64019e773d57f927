"""Pretrain a model of plain torch, a GPT of torch's own layers."""

from functools import partial

from torch import nn
from torch.nn import functional as F

from megatron.training import ModelType, get_args, pretrain


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(up, nn.GELU(), down, nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    def __init__(self, vocab, length, layers, hidden, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def model_provider(pre_process=True, post_process=True):
    a = get_args()
    vocab, length = a.padded_vocab_size, a.seq_length
    return NanoGPT(vocab, length, a.num_layers, a.hidden_size, a.num_attention_heads)


def loss_func(labels, loss_mask, logits):
    losses = F.cross_entropy(logits.float().mT, labels, reduction="none")
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss, tokens, {"lm loss": (loss.detach(), tokens)}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, *_ = next(data_iterator).values()
    return model(tokens), partial(loss_func, labels, loss_mask)


if __name__ == "__main__":
    pretrain(None, model_provider, ModelType.encoder_or_decoder, forward_step)
