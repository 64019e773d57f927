"""internlm-import --args: a run is saved, written as InternLM's ranks would, imported, and resumes
with the losses of the run that was not interrupted."""

from __future__ import annotations

import enum
import math
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.load_tool import load_tool
from tests.runs import NO_DROPOUT, SMALL, Finished, train, with_flags, write_text

HEADS = 4
LAYERS = 2
SAVED = 3
INTERNLM = (
    "--swiglu --ffn-hidden-size 48 --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --add-qkv-bias "
    "--add-attention-output-bias --apply-wd-to-all --vocab-size 216 "
    "--weight-decay 0.1 --eval-iters 0"
).split()
State = dict[str, torch.Tensor]
# As InternEvo has it since 0.3: each group of parameters names the ranks that share it.
MODES = "internlm.core.context.process_group_initializer"
MODE = enum.Enum("ParallelMode", {"ZERO1": "zero1"}, module=MODES)


def own_name(name: str, tensors: State, t: int, tp: int) -> State:
    """InternLM's tensors of one of ours on a tensor rank, by their names in the whole model."""
    x = tensors[name]
    if name == "embedding.word_embeddings.weight":
        return {"embedding.weight": x.chunk(tp, 1)[t]}
    if name == "output_layer.weight":
        return {"head.weight": x.chunk(tp)[t]}
    if name == "decoder.final_layernorm.weight":
        return {"norm.weight": x}
    _, _, layer, rest = name.split(".", 3)
    at = f"blocks.{layer}."
    kind = rest.rpartition(".")[2]
    if "linear_qkv" in rest:
        by_head = x.unflatten(0, (HEADS, 3, -1)).chunk(tp)[t]
        return {f"{at}mixer.Wqkv.{kind}": by_head.transpose(0, 1).flatten(0, 2)}
    if rest == "self_attention.linear_proj.weight":
        return {at + "mixer.out_proj.weight": x.chunk(tp, 1)[t]}
    if rest == "self_attention.linear_proj.bias":
        return {at + "mixer.out_proj.bias": x} if t == 0 else {}
    if rest == "mlp.linear_fc1.weight":
        gate, up = (half.chunk(tp)[t] for half in x)
        return {at + "mlp.w1.weight": gate, at + "mlp.w3.weight": up}
    if rest == "mlp.linear_fc2.weight":
        return {at + "mlp.w2.weight": x.chunk(tp, 1)[t]}
    norm = {"input_layernorm.weight": "norm1", "pre_mlp_layernorm.weight": "norm2"}[rest]
    return {f"{at}{norm}.weight": x}


BLOCK = "mixer.Wqkv mixer.out_proj norm1 norm2 mlp.w1 mlp.w2 mlp.w3".split()


def place(name: str) -> tuple[int, int, bool]:
    """Where a parameter is in the order of the model's definition."""
    ends = {"embedding.weight": -1, "norm.weight": LAYERS, "head.weight": LAYERS + 1}
    if name in ends:
        return ends[name], 0, False
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return int(layer), BLOCK.index(module), kind == "bias"


def on_rank(tensors: State, t: int, tp: int, p: int, pp: int) -> State:
    """The parameters of a rank in the model's order, blocks numbered from the stage's first."""
    per_stage = LAYERS // pp
    found: State = {}
    for name in tensors:
        found |= own_name(name, tensors, t, tp)
    stage = {}
    for name in sorted(found, key=place):
        layer = place(name)[0]
        if min(max(layer, 0), LAYERS - 1) // per_stage == p:
            stage[name.replace(f"blocks.{layer}.", f"blocks.{layer - p * per_stage}.")] = found[
                name
            ]
    return stage


def owners(sizes: dict[str, int], zero: int, in_order: bool) -> list[list[str]]:
    """The parameters of each ZeRO rank, in the order of its buffer."""
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    of: dict[str, int] = {}
    if in_order:
        rank = count = 0
        for name, size in sizes.items():
            count += size
            if count > 1.01 * (sum(sizes.values()) // zero) and rank < zero - 1:
                rank, count = rank + 1, 0
            of[name] = rank
    else:
        loads = [0] * zero
        for name in largest:
            of[name] = loads.index(min(loads))
            loads[of[name]] += sizes[name]
    return [[name for name in largest if of[name] == rank] for rank in range(zero)]


def modules_of_mode() -> dict[str, types.ModuleType]:
    """The modules in which pickle looks for `MODE`."""
    names = [MODES.rsplit(".", depth)[0] for depth in range(MODES.count(".") + 1)]
    modules = {name: types.ModuleType(name) for name in names}
    modules[MODES].ParallelMode = MODE
    return modules


def save(value: dict, path: Path) -> None:
    with mock.patch.dict(sys.modules, modules_of_mode()):
        torch.save(value, path)


def write_step(
    folder: Path, run: Finished, tp: int, pp: int, zero: int, in_order: bool = False
) -> None:
    """The checkpoint of iteration SAVED as InternLM's ranks write it."""
    all_tensors = run.tensors(SAVED)
    weights = {n: x for n, x in all_tensors.items() if not n.startswith("optimizer.")}

    def state(kind: str) -> State:
        return {
            name: all_tensors.get(f"optimizer.{kind}.{name}", weights[name]) for name in weights
        }

    folder.mkdir()
    for t in range(tp):
        for p in range(pp):
            model = on_rank(weights, t, tp, p, pp)
            torch.save(
                {f"model.{name}": x.clone() for name, x in model.items()},
                folder / f"model_tp{t}_pp{p}.pt",
            )
            kinds = {
                kind: on_rank(state(kind), t, tp, p, pp)
                for kind in ("fp32_param", "exp_avg", "exp_avg_sq")
            }
            sizes = {name: x.numel() for name, x in model.items()}
            for z, names in enumerate(owners(sizes, zero, in_order)):
                flat = {
                    kind: torch.cat([parts[name].reshape(-1).float() for name in names])
                    for kind, parts in kinds.items()
                    if names
                }
                adam = {"step": torch.tensor(float(SAVED))} | {
                    kind: x for kind, x in flat.items() if kind != "fp32_param"
                }
                group = {"lr": 1e-3, "betas": (0.9, 0.95), "optimizer_mode": MODE("zero1")}
                save(
                    {
                        "grad_scaler": {
                            "_scale": torch.tensor([1024.0]),
                            "_growth_step": SAVED,
                            "_hysteresis_step": 0,
                        },
                        "base_optim_states": {
                            "state": {0: adam} if names else {},
                            "param_groups": [
                                {"name": "default", "params": [0], **group},
                                {"name": "fp32", "params": [], **group, "dtype": None},
                            ],
                        },
                        "flat_fp32_weights": {0: flat["fp32_param"]} if names else {},
                    },
                    folder / f"optimizer_tp{t}_pp{p}_zo{z}.pt",
                )
    torch.save(
        {"batch_count": SAVED - 1, "step_count": SAVED, "num_consumed_tokens": 1},
        folder / "context.pt",
    )
    torch.save(
        dict(
            num_layers=LAYERS,
            hidden_size=32,
            num_attention_heads=HEADS,
            vocab_size=weights["output_layer.weight"].shape[0],
            layer_norm_epsilon=1e-5,
            embed_split_hidden=True,
        ),
        folder / "model_config.pt",
    )


def command(tmp_path: Path, *more: str) -> list[str]:
    text = write_text(tmp_path / "text", 200)
    data = ("--data-path", text, "--split", "100,0,0", "--train-iters", "6")
    return with_flags([*SMALL, *NO_DROPOUT], *INTERNLM, *data, *more)


@pytest.fixture
def step(tmp_path):
    """Train, write the folder `tmp_path/step` and the flags `tmp_path/args`."""

    def make(tp: int, pp: int, zero: int, in_order: bool, *more: str) -> tuple[Finished, list[str]]:
        argv = command(tmp_path, *more)
        (tmp_path / "args").write_text(" ".join(argv))
        save = ["--save", str(tmp_path / "one/save"), "--save-interval", str(SAVED)]
        run = train(tmp_path / "one", [*argv, *save])
        write_step(tmp_path / "step", run, tp, pp, zero, in_order)
        return run, argv

    return make


def convert(tmp_path: Path, *more: str) -> int:
    words = ["internlm-import", str(tmp_path / "step"), str(tmp_path / "ours")]
    words += ["--max-position-embeddings", "32", *more]
    return load_tool("convert_checkpoint").main(words)


@pytest.mark.parametrize(
    ("tp", "pp", "zero", "in_order", "more"),
    [
        (2, 2, 2, False, ("--bf16",)),
        pytest.param(1, 1, 3, True, (), marks=pytest.mark.campaign),
        pytest.param(
            2,
            1,
            3,
            True,
            ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "5"),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_a_run_resumes_where_internlm_saved(tp, pp, zero, in_order, more, step, tmp_path, capfd):
    run, argv = step(tp, pp, zero, in_order, *more)
    assert convert(tmp_path, "--args", str(tmp_path / "args")) == 0
    assert f"iteration {SAVED}" in capfd.readouterr().out
    resumed = train(tmp_path / "two", [*argv, "--load", str(tmp_path / "ours")])
    keys = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples")
    assert resumed.series(*keys) == run.series(*keys)[SAVED:]
    assert len(resumed.rows) == 3 and math.isfinite(resumed.rows[-1]["lm_loss"])


def test_without_the_flags_the_weights_alone_are_converted(step, tmp_path, capfd):
    run, argv = step(1, 1, 2, False)
    assert convert(tmp_path) == 0
    assert "weights only" in capfd.readouterr().out
    started = train(
        tmp_path / "two", [*argv, "--load", str(tmp_path / "ours"), "--exit-interval", "1"]
    )
    assert started.rows[0]["iteration"] == 1
    assert started.rows[0]["lm_loss"] != run.rows[0]["lm_loss"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: (s / "optimizer_tp0_pp0_zo1.pt").unlink(), "weights"),
        (lambda s: (s / "optimizer_tp1_pp0_zo0.pt").unlink(), "tp1_pp0_zo0.pt is missing"),
        (
            lambda s: (s / "optimizer_tp0_pp0_zo0.pt").rename(s / "optimizer_tp2_pp0_zo0.pt"),
            "optimizer_tp0_pp0_zo0.pt is missing",
        ),
        (lambda s: (s / "context.pt").unlink(), "context.pt"),
        (
            lambda s: torch.save({"batch_count": -2, "step_count": 1}, s / "context.pt"),
            "batch_count",
        ),
        (lambda s: edit(s, lambda o: o["flat_fp32_weights"][0].mul_(1.5)), "fp32 weights"),
        (lambda s: edit(s, lambda o: o["flat_fp32_weights"].update({1: torch.ones(3)})), "groups"),
        (lambda s: edit(s, lambda o: o["base_optim_states"]["state"][0].pop("exp_avg_sq")), "flat"),
        (lambda s: edit(s, lambda o: o["base_optim_states"]["state"][0].update(step=7)), "updates"),
        (
            lambda s: edit(s, lambda o: o["base_optim_states"]["state"][0].update(step=math.inf)),
            "step is inf",
        ),
        (lambda s: edit(s, lambda o: o.update(evil=Payload())), "may be meant to run code"),
    ],
)
def test_damaged_files_are_refused_and_nothing_is_written(damage, said, step, tmp_path, capfd):
    step(2, 1, 2, False)
    damage(tmp_path / "step")
    assert convert(tmp_path, "--args", str(tmp_path / "args")) == 1
    errors = capfd.readouterr().err
    assert said in errors and all(line.startswith("error: ") for line in errors.splitlines()), (
        errors
    )
    assert not (tmp_path / "ours").exists() and not (tmp_path / "executed").exists()


def test_flags_of_another_model_are_refused(step, tmp_path, capfd):
    _, argv = step(1, 1, 1, False)
    (tmp_path / "args").write_text(" ".join(with_flags(argv, "--num-attention-heads", "2")))
    assert convert(tmp_path, "--args", str(tmp_path / "args")) == 1
    assert "num_attention_heads" in capfd.readouterr().err
    (tmp_path / "args").write_text("--lr 1 --train-iters 3")
    assert convert(tmp_path, "--args", str(tmp_path / "args")) == 1
    assert "--global-batch-size" in capfd.readouterr().err


class Payload:
    """Would make a file."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def edit(folder: Path, change) -> None:
    """Change the first optimizer file."""
    path = folder / "optimizer_tp0_pp0_zo0.pt"
    with mock.patch.dict(sys.modules, modules_of_mode()):
        table = torch.load(path, weights_only=False)
    change(table)
    save(table, path)
