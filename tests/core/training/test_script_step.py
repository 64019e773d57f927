"""Scripts with a forward_step in Megatron's form train as pretrain_gpt.py does."""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.config.script import Script
from megatron.model.gpt import GPTModel
from megatron.training import (
    ModelType,
    get_args,
    get_tokenizer,
    pretrain,
    print_rank_last,
    script_step,
)
from megatron.training.batch import Batch
from tests.core.training.script_runs import LAYOUTS, rows_of_run, steps_of
from tests.forkrun import ROOT
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, plot, with_flags, write_text

FLAGS = with_flags([*SMALL, *NO_DROPOUT], *"--fp64 --train-iters 3 --lr-warmup-iters 1".split())


def mean_loss(loss_mask, output):
    """As in Megatron of 2023."""
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def summed_loss(loss_mask, output):
    """As in Megatron of 2025: a report has (sum, count) as one tensor."""
    loss = (output * loss_mask).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def with_z(loss_mask, output):
    """A loss of which a part is reported."""
    loss, tokens, report = summed_loss(loss_mask, output)
    return 2.0 * loss, tokens, {**report, "z loss": torch.stack([loss.detach(), tokens])}


def forward_step(loss_func, data_iterator, model):
    batch = next(data_iterator)
    args = get_args()
    args.calls = getattr(args, "calls", 0) + 1
    assert get_tokenizer().vocab_size == args.vocab_size == model.vocab_size
    tokens, labels, loss_mask, attention_mask, position_ids = batch.values()
    assert attention_mask is None or attention_mask.shape[-2:] == (args.seq_length,) * 2
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, functools.partial(loss_func, loss_mask)


def from_logits(data_iterator, model):
    """A loss of the script's own formula."""
    tokens, labels, loss_mask, attention_mask, position_ids = next(data_iterator).values()
    logits = model(tokens, position_ids, attention_mask)

    def loss_func(output):
        losses = torch.nn.functional.cross_entropy(
            output.flatten(0, 1), labels.flatten(), reduction="none"
        )
        return summed_loss(loss_mask.flatten(), losses)

    return logits, loss_func


def program(step, argv: list[str]) -> None:
    def add_arguments(parser):
        parser.add_argument("--own", type=int, default=1)

    defaults = {"timing_log_level": 2, "log_interval": 50, "own": 2}
    pretrain(
        *(None, None, ModelType.encoder_or_decoder, step),
        extra_args_provider=add_arguments,
        args_defaults=defaults,
        argv=argv,
    )
    args = get_args()
    assert (args.own, args.timing_log_level, args.log_interval) == (2, 2, 1)
    print_rank_last("calls")


def _rank(rank: int, world: int, folder: Path, loss_func, argv: list[str]) -> None:
    with open(folder / f"log.{rank}", "a") as log, contextlib.redirect_stdout(log):
        if loss_func is None:
            plot().main(argv)
        else:
            own = functools.partial(forward_step, loss_func)
            program(from_logits if loss_func == "from logits" else own, argv)


def run(folder: Path, loss_func, *flags: str, world: int = 1) -> list[dict]:
    return rows_of_run(_rank, folder, loss_func, FLAGS, *flags, world=world)


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(x, marks=pytest.mark.campaign) for x in list(LAYOUTS)[1:])]
)
def test_a_step_of_megatron_s_form_trains_alike(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    words = "--reset-position-ids --reset-attention-mask --eod-mask-loss --eval-interval 2".split()
    words += ["--data-path", write_text(tmp_path / "text", 200), "--split", "90,5,5", *flags]
    if layout == "context":
        words = ["--mock-data", *flags]
    wanted = steps_of(run(tmp_path / "ours", None, *words, world=world))
    for row, other in zip(
        steps_of(run(tmp_path / "sums", summed_loss, *words, world=world)), wanted, strict=True
    ):
        assert row == pytest.approx(other, rel=1e-10)  # the sum has another order

    for row, other in zip(
        steps_of(run(tmp_path / "logits", "from logits", *words, world=world)), wanted, strict=True
    ):
        assert row == pytest.approx(other, rel=1e-10)

    doubled = run(tmp_path / "z", with_z, *words, world=world)
    assert doubled[0]["lm_loss"] == pytest.approx(wanted[0][1], rel=1e-12)
    assert doubled[0]["grad_norm"] == pytest.approx(2 * wanted[0][2], rel=1e-9)
    assert doubled[0]["z loss"] == pytest.approx(wanted[0][1], rel=1e-9)


def test_means_of_micro_batches_count_alike(tmp_path):
    """Without a mask that is the mean over tokens."""
    wanted = run(tmp_path / "ours", None, "--mock-data")
    got = run(tmp_path / "means", mean_loss, "--mock-data")
    for row, other in zip(steps_of(got), steps_of(wanted), strict=True):
        assert row == pytest.approx(other, rel=1e-6)


def batch_of(rows: torch.Tensor, documents: torch.Tensor | None = None) -> Batch:
    return Batch(rows[:, :-1], rows[:, 1:], document_ids=documents)


def test_what_the_iterator_gives():
    given = script_step.micro_batch(batch_of(torch.arange(8).view(2, 4)))
    assert given["tokens"].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert given["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert given["loss_mask"].tolist() == [[1.0] * 3] * 2 and given["attention_mask"] is None
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    mask = script_step.micro_batch(batch_of(torch.arange(8).view(2, 4), documents))[
        "attention_mask"
    ]
    seen = [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    assert (~mask[:, 0]).int().tolist() == seen


class Model(GPTModel):
    """A last stage whose losses are its tokens."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.output_layer = torch.nn.Identity()

    def forward(self, tokens, *args, **kwargs):
        return tokens.double()


WRONG = {
    "no loss_func": ("forward-step-result", lambda it, model: model(next(it)["tokens"])),
    "a loss alone": ("forward-step-result", lambda it, model: (next(it)["tokens"], torch.sum)),
    "two": ("one-micro-batch", lambda it, model: (next(it), next(it))),
    "a mask": (
        "attention-mask-given",
        lambda it, model: model(next(it)["tokens"], None, torch.ones(2, 1, 3, 3)),
    ),
    "an argument": (
        "no-such-argument",
        lambda it, model: model(next(it)["tokens"], packed_seq_params=1),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_step_is_named(wrong):
    code, step = WRONG[wrong]
    with raises(ValueError, code):
        script_step.as_batch_step(Script(step))(batch_of(torch.arange(8).view(2, 4)), Model())


def test_a_wrong_call_of_pretrain_is_named():
    for model_type, others in ((ModelType, {}), ("encoder_or_decoder", {"store": 1})):
        with raises(ValueError, "no-such-argument"):
            pretrain(None, None, model_type, forward_step, argv=[], **others)


def test_another_megatron_first_on_the_path_is_one_message(tmp_path):
    other = tmp_path / "megatron" / "training"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import pretrain_gpt; pretrain_gpt.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("[other-megatron]")
