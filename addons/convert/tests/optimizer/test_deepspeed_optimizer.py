"""deepspeed-import with ZeRO's optimizer: a run is saved, written as Megatron-DeepSpeed's ranks
would, imported, and resumes with the losses of the run that was not interrupted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron.addons.convert.tests.deepspeed_writer import Adam, deepspeed_classes, write_files
from megatron.checkpoint import reading
from megatron.training.checkpointing.saved_args import saved_config
from tests.core.model.tiny import tiny_config, tiny_model
from tests.load_tool import load_tool
from tests.runs import NO_DROPOUT, SMALL, Finished, train, with_flags, write_text

SAVED = 3
LLAMA = (
    "--swiglu --ffn-hidden-size 48 --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
).split()
RUN = "--weight-decay 0.1 --eval-iters 0 --vocab-size 216 --lr-warmup-iters 2".split()
FP16 = ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "5")
SIZE = dict(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8)
KINDS = ("fp32_param", "exp_avg", "exp_avg_sq")


@pytest.fixture
def step(tmp_path):
    """Train, write the folder `tmp_path/step`: the run and its command line."""

    def make(tp: int, pp: int, dp: int, *more: str, **changes) -> tuple[Finished, list[str]]:
        text = write_text(tmp_path / "text", 200)
        data = ("--data-path", text, "--split", "100,0,0", "--train-iters", "6")
        argv = with_flags([*SMALL, *NO_DROPOUT], *RUN, *data, *more)
        save = ["--save", str(tmp_path / "one/save"), "--save-interval", str(SAVED)]
        run = train(tmp_path / "one", [*argv, *save])
        tensors = run.tensors(SAVED)
        weights = {n: x for n, x in tensors.items() if not n.startswith("optimizer.")}
        states = {
            kind: {n: tensors.get(f"optimizer.{kind}.{n}", weights[n]) for n in weights}
            for kind in KINDS
        }
        found = reading.load(tmp_path / "one/save", SAVED)
        scaler = None
        if "--fp16" in more:
            scaler = dict(cur_scale=1024.0, dynamic=True, cur_iter=SAVED + 1)
            scaler |= dict(last_overflow_iter=-1, scale_window=5, cur_hysteresis=2)
        adam = Adam(states, dp, SAVED, scaler, elastic=changes.pop("elastic", False))
        state = found.state
        root = {
            "iteration": SAVED,
            "lr_scheduler": state.scheduler | {"lr_warmup_tokens": None, "num_tokens": 0},
        }
        counted = {"consumed_train_samples": state.consumed_train_samples}
        model = saved_config(found).model
        write_files(
            tmp_path / "step", weights, model, tp, pp, adam=adam, args=counted, **root | changes
        )
        return run, argv

    return make


def convert(tmp_path: Path, *more: str) -> int:
    words = ["deepspeed-import", str(tmp_path / "step"), str(tmp_path / "ours"), *more]
    return load_tool("convert_checkpoint").main(words)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "more", "elastic"),
    [
        (2, 2, 3, ("--bf16", *LLAMA), False),
        pytest.param(1, 2, 2, (), False, marks=pytest.mark.campaign),
        pytest.param(2, 0, 2, FP16, True, marks=pytest.mark.campaign),
        pytest.param(1, 0, 1, LLAMA, False, marks=pytest.mark.sweep),
        pytest.param(2, 2, 4, ("--bf16",), True, marks=pytest.mark.sweep),
    ],
)
def test_a_run_resumes_where_deepspeed_saved(tp, pp, dp, more, elastic, step, tmp_path, capfd):
    run, argv = step(tp, pp, dp, *more, elastic=elastic)
    assert convert(tmp_path) == 0
    assert f"iteration {SAVED}" in capfd.readouterr().out
    resumed = train(tmp_path / "two", [*argv, "--load", str(tmp_path / "ours")])
    keys = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples")
    assert resumed.series(*keys) == run.series(*keys)[SAVED:]
    assert len(resumed.rows) == 3 and math.isfinite(resumed.rows[-1]["lm_loss"])


SCHEDULE = dict(max_lr=1e-3, lr_warmup_steps=4, num_steps=12, lr_decay_style="cosine")
SCHEDULE |= dict(lr_decay_steps=52, min_lr=0.0, start_wd=0.1, end_wd=0.1)
SCHEDULE |= dict(wd_incr_style="constant", wd_incr_steps=52)


def made_up(tmp_path: Path, **root) -> None:
    """A checkpoint in `tmp_path/step` at TP 2 PP 2 and two data-parallel ranks, not trained."""
    model = tiny_model(vocab=64, padded=64, scramble=True, **SIZE)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    adam = Adam({kind: tensors for kind in KINDS}, dp=2, step=SAVED)
    root = {"iteration": SAVED, "lr_scheduler": SCHEDULE} | root
    config = tiny_config(**SIZE)
    counted = {"consumed_train_samples": 12}
    write_files(tmp_path / "step", tensors, config, 2, 2, adam=adam, args=counted, **root)


def test_the_weights_alone_are_converted_on_request(tmp_path, capfd):
    made_up(tmp_path, lr_scheduler=None)
    assert convert(tmp_path) == 1 and "--no-load-optim" in capfd.readouterr().err
    assert convert(tmp_path, "--no-load-optim") == 0
    found = reading.load(tmp_path / "ours")
    with found.reader() as reader:
        assert not [name for name in reader.names() if name.startswith("optimizer.")]
    assert found.iteration == 0


class Payload:
    """Would make a file."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


FIRST = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def edit(folder: Path, change) -> None:
    """Change the first optimizer file."""
    with deepspeed_classes():
        table = torch.load(folder / FIRST, weights_only=False)
        change(table["optimizer_state_dict"])
        torch.save(table, folder / FIRST)


def first_slice(state: dict):
    return next(iter(state["param_slice_mappings"][0].values()))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: (s / FIRST).unlink(), "ranks [1]"),
        (lambda s: (s / FIRST.replace("rank_0_", "rank_1_")).unlink(), "one of 2 data-parallel"),
        (
            lambda s: (s / FIRST.replace("_00_", "_03_")).rename(s / FIRST.replace("_00_", "_07_")),
            "mp_rank_07_optim_states.pt",
        ),
        (lambda s: (s / FIRST).write_bytes((s / FIRST).read_bytes()[:999]), "zip file"),
        (lambda s: edit(s, lambda o: o.update(evil=Payload())), "pathlib.Path"),
        (lambda s: edit(s, lambda o: o.pop("param_slice_mappings")), "param_slice_mappings"),
        (
            lambda s: edit(s, lambda o: vars(first_slice(o)).update(numel=1 << 40)),
            f"{1 << 40} numbers",
        ),
        (lambda s: edit(s, lambda o: vars(first_slice(o)).update(start=-1)), "at -1, "),
        (lambda s: edit(s, lambda o: o["param_slice_mappings"][0].popitem()), "numbers on"),
        (
            lambda s: edit(s, lambda o: o["param_slice_mappings"][0].update(x=first_slice(o))),
            ": x is",
        ),
        (
            lambda s: edit(s, lambda o: o["single_partition_of_fp32_groups"][0].mul_(1.5)),
            "embedding.word_embeddings.weight",
        ),
        (
            lambda s: edit(s, lambda o: o["base_optimizer_state"]["state"][0].pop("exp_avg_sq")),
            "exp_avg_sq",
        ),
        (
            lambda s: edit(s, lambda o: o["base_optimizer_state"]["state"][0].update(step=7)),
            "[3, 7]",
        ),
    ],
)
def test_damaged_files_are_refused_and_nothing_is_written(damage, said, tmp_path, capfd):
    made_up(tmp_path)
    damage(tmp_path / "step")
    assert convert(tmp_path) == 1
    errors = capfd.readouterr().err
    assert said in errors and all(line.startswith("error: ") for line in errors.splitlines()), (
        errors
    )
    assert not (tmp_path / "ours").exists() and not Path("executed").exists()


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ({"lr_scheduler": SCHEDULE | {"lr_decay_tokens": 9}}, "lr_decay_tokens"),
        ({"lr_scheduler": {"num_steps": 12}}, "lacks max_lr"),
        ({"lr_scheduler": SCHEDULE | {"max_lr": float("nan")}}, "lacks max_lr"),
        ({"iteration": -2}, "iteration is -2"),
    ],
)
def test_counters_that_cannot_be_read_are_refused(root, said, tmp_path, capfd):
    made_up(tmp_path, **root)
    assert convert(tmp_path) == 1
    assert said in capfd.readouterr().err and not (tmp_path / "ours").exists()
