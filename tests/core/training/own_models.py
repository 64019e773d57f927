"""Models of a script's own, and runs with them."""

import contextlib
import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron.checkpoint import reading
from megatron.config.plan.parameters import ParameterSpec, parameter_table
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.parallel.sharding import Sharding, draw_values, parameter
from megatron.training import GPTModel, ModelType, get_args, pretrain
from tests.core.training.built_runs import config_of
from tests.forkrun import RanksFailed, run_ranks
from tests.runs import NO_DROPOUT, SMALL, kill_in, with_flags

ITERATIONS = 4
FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT],
    *f"--fp64 --train-iters {ITERATIONS} --lr-decay-style constant --lr-warmup-iters 0".split(),
    *"--eval-iters 0 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0.5".split(),
)


class Texts(torch.utils.data.Dataset):
    """Random ids, some without a loss; sample k is a function of k."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 211, (33,), generator=random)
        mask = (torch.rand(32, generator=random) < 0.8).float()
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}


class Nano(nn.Module):
    """A bigram model with a residual MLP, tied weights, a frozen parameter and one without use."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(216, 24), nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.Dropout(0.2))
        self.head = nn.Linear(24, 216, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.full((1,), 3.0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.randn(24))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.shift
        return self.scale * self.head(self.norm(x + self.mlp(x)))


def without_dropout():
    model = Nano()
    model.mlp[3].p = 0.0
    return model


def own_loss(labels, mask, logits):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss, tokens = (losses * mask.flatten()).sum(), mask.sum()
    return loss, tokens, {"lm loss": (loss.detach(), tokens)}


def own_step(data_iterator, model):
    tokens, labels, mask, *_ = next(data_iterator).values()
    return model(tokens), functools.partial(own_loss, labels, mask)


def gpt_loss(mask, losses):
    loss, tokens = (losses * mask).sum(), mask.sum()
    return loss, tokens, {"lm loss": (loss.detach(), tokens)}


def gpt_step(data_iterator, model):
    tokens, labels, mask, attention_mask, position_ids = next(data_iterator).values()
    losses = model(tokens, position_ids, attention_mask, labels=labels)
    return losses, functools.partial(gpt_loss, mask)


class PlainMLP(nn.Module):
    """Our MLP, in plain torch, with our initial values; of Megatron's marks it has the one for
    --sequence-parallel."""

    def __init__(self, layer: str):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        model = config_of().model
        table = {spec.name: spec for spec in parameter_table(model, 216, 211)}
        for linear, name in ((self.up, "linear_fc1"), (self.down, "linear_fc2")):
            spec = table[f"decoder.layers.{layer}.mlp.{name}.weight"]
            values = draw_values(
                Sharding(spec.name, spec.shape, init=spec.init, std=spec.std), 1234
            )
            linear.weight.data = values
            nn.init.zeros_(linear.bias)
        for p in self.parameters():
            p.sequence_parallel = True

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def gpt(pre_process, post_process):
    return GPTModel(
        config=get_args(),
        transformer_layer_spec=None,
        vocab_size=get_args().padded_vocab_size,
        max_sequence_length=get_args().max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not get_args().untie_embeddings_and_output_weights,
    )


def changed(pre_process, post_process):
    model = gpt(pre_process, post_process)
    if "1" in model.decoder.layers:
        model.decoder.layers["1"].mlp = PlainMLP("1")
    return model


def other_activation(pre_process, post_process):
    model = gpt(pre_process, post_process)
    model.decoder.layers["1"].mlp.activation = torch.sin
    return model


def hooked(pre_process, post_process):
    model = gpt(pre_process, post_process)
    model.decoder.layers["1"].mlp.register_forward_hook(lambda module, given, out: 2 * out)
    return model


class Unmarked(PlainMLP):
    """A parameter that sees part of the tokens with --sequence-parallel, and no mark."""

    def __init__(self, layer: str):
        super().__init__(layer)
        for p in self.parameters():
            p.sequence_parallel = False


def unmarked(pre_process, post_process):
    model = gpt(pre_process, post_process)
    model.decoder.layers["1"].mlp = Unmarked("1")
    return model


class Split(nn.Module):
    """A bigram model of our parallel layers between norms of plain torch; losses [b, s]."""

    PARAMETERS = {  # shape, the dim that is split
        "embedding": ((216, 24), 0),
        "up": ((40, 24), 0),
        "up.bias": ((40,), 0),
        "down": ((24, 40), 1),
        "down.bias": ((24,), None),
        "head": ((216, 24), 0),
    }

    def __init__(self, pg_collection):
        super().__init__()
        ctx, args = pg_collection, get_args()

        def made(name):
            spec = split_spec(name)
            partial = spec.partial_axes(ctx.sequence_parallel)
            return parameter(spec, ctx, args.params_dtype, partial=partial)

        self.tp = ctx.tp
        self.embedding = VocabParallelEmbedding(made("embedding"), ctx)
        self.norm, self.last_norm = nn.LayerNorm(24), nn.LayerNorm(24)
        for p in (*self.norm.parameters(), *self.last_norm.parameters()):
            p.sequence_parallel = True
        self.up = ColumnParallelLinear(made("up"), made("up.bias"), ctx)
        self.down = RowParallelLinear(made("down"), made("down.bias"), ctx)
        self.head = ColumnParallelLinear(made("head"), None, ctx)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(self.last_norm(x))
        return vocab_parallel_cross_entropy(logits, labels, vocab_size=211, tp=self.tp)


def split_spec(name):
    shape, dim = Split.PARAMETERS[name]
    splits = () if dim is None else (("tp", dim),)
    return ParameterSpec(name, shape, splits, init="normal", std=0.2)


def split_step(data_iterator, model):
    tokens, labels, mask, *_ = next(data_iterator).values()
    return model(tokens, labels), functools.partial(gpt_loss, mask)


class Counting(Nano):
    def forward(self, tokens):
        self.shift += 1
        return super().forward(tokens)


def of_each_rank(pg_collection):
    torch.manual_seed(pg_collection.world.rank)
    return Nano()


PROVIDERS = {
    "ours": (None, gpt_step),
    "gpt": (gpt, gpt_step),
    "changed": (changed, gpt_step),
    "other_activation": (other_activation, gpt_step),
    "hooked": (hooked, gpt_step),
    "unmarked": (unmarked, gpt_step),
    "nano": (without_dropout, own_step),
    "dropout": (lambda **offered: Nano(), own_step),
    "split": (Split, split_step),
    "counting": (Counting, own_step),
    "of each rank": (of_each_rank, own_step),
    "nothing": (lambda pre_process: None, own_step),
}


def _rank(
    rank: int, world: int, folder: Path, name: str, argv: list[str], kill_at: int | None
) -> None:
    provider, step = PROVIDERS[name]
    if kill_at:
        kill_in(kill_at)
    with open(folder / f"log.{rank}", "a") as log, contextlib.redirect_stdout(log):
        data = lambda sizes: (Texts(), None, None)  # noqa: E731
        pretrain(data, provider, ModelType.encoder_or_decoder, step, argv=argv)


def run(
    folder: Path, name: str, *flags: str, world: int = 1, kill_at: int | None = None
) -> tuple[list[dict], dict]:
    """The last rows of each iteration, and the tensors of the last checkpoint. With `kill_at` the run is
    killed in that iteration."""
    folder.mkdir(exist_ok=True)
    files = ["--save", folder / "save", "--load", folder / "save", "--metrics-file", folder / "m"]
    argv = with_flags(FLAGS, *map(str, files), *flags)
    if "--bf16" in argv:
        argv.remove("--fp64")
    killed = (
        pytest.raises(RanksFailed, match="exit code -9") if kill_at else contextlib.nullcontext()
    )
    with killed:
        run_ranks(world, _rank, folder, name, argv, kill_at, seconds=100.0)
    kept = ("iteration", "lm_loss", "grad_norm")
    rows = [json.loads(row) for row in (folder / "m").read_text().splitlines()]
    with reading.load(folder / "save").reader() as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
    by_iteration = {row["iteration"]: {key: row.get(key) for key in kept} for row in rows}
    return list(by_iteration.values()), tensors
