"""tools/convert_checkpoint.py megatron-import of torch_dist with its optimizer: megatron-core's own
training goes on here with the same numbers; what cannot be read is one message."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from megatron.addons.convert.tests.megatron_files import (
    LLAMA,
    MODELS,
    SIZE,
    VOCAB,
    Call,
    stacked_tensors,
    unsaid,
    write_torch_dist,
)
from megatron.addons.convert.tests.megatron_training import FLAGS, train_and_save_on_a_rank
from megatron.checkpoint import reading
from tests.core.model.tiny import tiny_model
from tests.forkrun import run_ranks
from tests.runs import train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCHEDULE = dict(
    max_lr=0.003,
    lr_warmup_steps=8,
    num_steps=12,
    lr_decay_style="cosine",
    lr_decay_steps=52,
    min_lr=0.0003,
    start_wd=0.1,
    end_wd=0.1,
    wd_incr_style="constant",
    wd_incr_steps=52,
)
KINDS = ("param", "exp_avg", "exp_avg_sq")
COUNTED = dict(consumed_train_samples=12, consumed_valid_samples=0)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("sharding", "name", "layout"),
    [
        pytest.param("fully_reshardable", "llama", (2, 2), marks=pytest.mark.campaign),
        pytest.param("dp_reshardable", "gpt2", (2, 2), marks=pytest.mark.sweep),
        pytest.param("dp_reshardable", "llama", (2, 2), marks=pytest.mark.sweep),
        # without Transformer Engine its tensor ranks do not sum the gradient of the rotary key
        pytest.param("fully_reshardable", "latent attention", (1, 2), marks=pytest.mark.sweep),
        pytest.param("dp_reshardable", "latent attention", (1, 2), marks=pytest.mark.sweep),
        pytest.param("dp_reshardable", "llama tied, qkv bias", (1, 2), marks=pytest.mark.sweep),
        pytest.param("fully_reshardable", "gpt2", (1, 1), marks=pytest.mark.sweep),
    ],
)
def test_the_next_steps_are_those_of_megatron_core(sharding, name, layout, tmp_path, convert):
    """Losses of ten iterations after the save, theirs on TP x PP ranks, ours in one process."""
    pytest.importorskip("megatron.core")
    tp, pp = layout
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    arguments = (MODELS[name], tp, pp, tmp_path / "theirs", metadata)
    theirs = run_ranks(tp * pp, train_and_save_on_a_rank, *arguments)[-1]
    words = unsaid(MODELS[name], tmp_path)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", *words)
    done = train(
        tmp_path / "run", ["--load", str(tmp_path / "ours"), "--use-checkpoint-args", *FLAGS]
    )
    ours = [loss for (loss,) in done.series("lm_loss")]
    assert len(ours) == 10
    assert ours == pytest.approx(theirs, rel=0, abs=1e-5)
    assert max(theirs) - min(theirs) > 0.5, "nothing was learnt"


def states() -> dict[str, dict[str, torch.Tensor]]:
    """Made-up Adam states by kind: tensors under Megatron's names, layers stacked; main weights
    are those of the model with bits that bf16 has not."""
    weights = stacked_tensors(LLAMA)
    random = torch.Generator().manual_seed(3)
    return {
        kind: {
            name: value + torch.rand(value.shape, generator=random) * 1e-6
            for name, value in weights.items()
        }
        for kind in KINDS
    }


def common(**changes):
    groups = [{"step": 3.0, "wd_mult": 1.0}, {"step": 3.0, "wd_mult": 0.0}]
    return {
        "iteration": 3,
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        },
        "opt_param_scheduler": dict(SCHEDULE),
    } | changes


def by_name(folder, change=lambda tensors, root: None, args=COUNTED):
    """A torch_dist folder of a bf16 model with its optimizer by name."""
    found = states()
    tensors = {name: value.bfloat16() for name, value in found["param"].items()}
    for kind in KINDS:
        tensors |= {f"optimizer.state.{kind}.{name}": v for name, v in found[kind].items()}
    root = common()
    change(tensors, root)
    write_torch_dist(folder, LLAMA, tensors, root, **args)
    return found


FUSED = ("linear_proj", "input_layernorm", "linear_qkv", "pre_mlp_layernorm", "linear_fc1")
PLAIN = ("input_layernorm", "linear_proj", "linear_qkv", "pre_mlp_layernorm", "linear_fc1")


def by_buffer(folder, order=FUSED, change=lambda tensors, root: None):
    """The same with the flat buffers of TP 1 and PP 2, each in buckets."""
    found = states()
    tensors = {name: value.bfloat16() for name, value in found["param"].items()}
    for kind in KINDS:
        for stage in range(2):
            parts = {} if stage else {"embedding": found[kind]["embedding.word_embeddings.weight"]}
            for layer in (2 * stage, 2 * stage + 1):
                for module in (*order, "linear_fc2"):
                    name = next(n for n in found[kind] if f".{module}." in n)
                    parts[layer, module] = found[kind][name][layer]
            if stage:
                parts["norm"] = found[kind]["decoder.final_layernorm.weight"]
                parts["output"] = found[kind]["output_layer.weight"]
            buckets = [[]]
            for value in reversed(parts.values()):
                if sum(map(len, buckets[-1])) > 20000:
                    buckets.append([])
                buckets[-1] += [torch.empty(-sum(map(len, buckets[-1])) % 64), value.flatten()]
            for number, bucket in enumerate(buckets):
                key = (
                    f"optimizer.distributed.dp_group_idx_{stage}.gbuf_idx_0.dtype_(torch.bfloat16, "
                    f"torch.float32).bucket_idx_{number}.{kind}"
                )
                tensors[key] = torch.cat(bucket)
    root = common(optimizer={"param_state_sharding_type": "dp_reshardable"})
    groups = argparse.Namespace(
        optimizer={"param_groups": [{"step": 3.0}]}
    )  # no dict: dcp takes it apart
    for stage in range(2):
        tensors[f"optimizer.distributed.dp_group_idx_{stage}.optimizer/shard_0_1"] = groups
    change(tensors, root)
    write_torch_dist(folder, LLAMA, tensors, root, pipeline_model_parallel_size=2, **COUNTED)
    return found


@pytest.mark.parametrize("write", [by_name, by_buffer, lambda f: by_buffer(f, PLAIN)])
def test_every_number_of_the_optimizer_comes_along(write, tmp_path, convert):
    theirs = write(tmp_path / "theirs")
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    found = reading.load(tmp_path / "ours")
    assert found.iteration == 3
    assert found.state.consumed_train_samples == 12
    assert found.state.optimizer == {"optimizer": "adam", "step": 3, "grad_scaler": None}
    assert found.state.scheduler == SCHEDULE
    names = [
        name
        for name, _ in tiny_model(vocab=VOCAB, padded=VOCAB, **SIZE, **LLAMA).named_parameters()
    ]
    with found.reader() as reader:
        assert len(reader.names()) == 4 * len(names)
        for ours, kind in zip(("fp32_param", "exp_avg", "exp_avg_sq"), KINDS, strict=True):
            for name in names:
                parts = name.split(".")
                layered = name.startswith("decoder.layers.")
                want = theirs[kind][".".join(parts[:2] + parts[3:]) if layered else name]
                want = want[int(parts[2])] if layered else want
                got = reader.read(f"optimizer.{ours}.{name}")
                assert torch.equal(got.flatten(), want.flatten()), (kind, name)


def test_weights_alone(tmp_path, convert):
    by_name(tmp_path / "theirs", lambda tensors, root: root.pop("opt_param_scheduler"))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", "--no-load-optim")
    found = reading.load(tmp_path / "ours")
    assert found.iteration == 0
    assert not any(name.startswith("optimizer.") for name in found.manifest.tensors)


def test_a_loss_scale_comes_along(tmp_path, convert):
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    by_name(tmp_path / "theirs", lambda t, root: root["optimizer"].update(grad_scaler=scaler))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    kept = reading.load(tmp_path / "ours").state.optimizer["grad_scaler"]
    assert kept == {"scale": 4096.0, "growth_tracker": 7, "hysteresis_tracker": 2}


QKV = "decoder.layers.self_attention.linear_qkv.weight"
MOMENT = f"optimizer.state.exp_avg.{QKV}"


def formatted(kind):
    return lambda t, root: root["optimizer"].update(param_state_sharding_type=kind)


def schedule(**changes):
    return lambda t, root: root["opt_param_scheduler"].update(changes)


WRONG = {
    "sharded in model space": formatted("fully_sharded_model_space"),
    "gathered": formatted("dp_zero_gather_scatter"),
    "format is a list": formatted(["x"]),
    "moment missing": lambda t, root: t.pop(MOMENT),
    "main weight missing": lambda t, root: t.pop(MOMENT.replace("exp_avg", "param")),
    "moment with a layer less": lambda t, root: t.update({MOMENT: t[MOMENT][:-1].clone()}),
    "moment of integers": lambda t, root: t.update({MOMENT: t[MOMENT].int()}),
    "moment of doubles": lambda t, root: t.update({MOMENT: t[MOMENT].double()}),
    "moment of no parameter": lambda t, root: t.update({MOMENT + "x": t[MOMENT]}),
    "momentum of SGD": lambda t, root: t.update(
        {MOMENT.replace("exp_avg", "momentum_buffer"): t[MOMENT]}
    ),
    "unknown tensor": lambda t, root: t.update({"optimizer.other": torch.ones(2)}),
    "no update count": lambda t, root: root["optimizer"].pop("optimizer"),
    "two update counts": lambda t, root: root["optimizer"].update(more={"step": 5}),
    "update count of -1": lambda t, root: root.update(optimizer={"step": -1}),
    "update count NaN": lambda t, root: root.update(optimizer={"step": math.nan}),
    "update count infinite": lambda t, root: root.update(optimizer={"step": math.inf}),
    "no schedule": lambda t, root: root.pop("opt_param_scheduler"),
    "schedule is a number": lambda t, root: root.update(opt_param_scheduler=3),
    "schedule of lists": schedule(max_lr=[1.0]),
    "schedule without samples": schedule(num_steps="many"),
    "no iteration": lambda t, root: root.pop("iteration"),
    "negative iteration": lambda t, root: root.update(iteration=-3),
    "loss scale of words": lambda t, root: root["optimizer"].update(grad_scaler={"scale": "x"}),
    "tracker of words": lambda t, root: root["optimizer"].update(
        grad_scaler={"scale": 4.0, "growth_tracker": "x"}
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_optimizers(case, tmp_path, convert):
    by_name(tmp_path / "theirs", WRONG[case])
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert "error: " in said and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "something was left behind"


def test_samples_that_nobody_has_counted(tmp_path, convert):
    by_name(tmp_path / "theirs", args={"consumed_train_samples": None})
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert "consumed_train_samples" in said


def of_bucket(change):
    """A change of the first stage's first bucket of main weights."""

    def do(tensors, root):
        key = next(key for key in tensors if "idx_0.gbuf" in key and key.endswith("idx_0.param"))
        change(tensors, key)

    return do


WRONG_BUFFERS = {
    "another number": of_bucket(lambda t, key: t[key].__setitem__(70, 7.0)),
    "too short": of_bucket(lambda t, key: t.update({key: t[key][:-64].clone()})),
    "too long": of_bucket(lambda t, key: t.update({key: torch.cat([t[key], torch.ones(64)])})),
    "a matrix": of_bucket(lambda t, key: t.update({key: t[key].view(-1, 2)})),
    "no bucket": of_bucket(lambda t, key: t.pop(key)),
    "one rank more": of_bucket(
        lambda t, key: t.update({key.replace("dp_group_idx_0", "dp_group_idx_2"): t[key]})
    ),
    "by name as well": lambda t, root: t.update(
        {"optimizer.state.exp_avg.output_layer.weight": torch.ones(64, 64)}
    ),
    "another kind": of_bucket(lambda t, key: t.update({key + "x": t[key]})),
    "no counts": lambda t, root: [t.pop(key) for key in list(t) if "shard_0_1" in key],
}


@pytest.mark.parametrize("case", WRONG_BUFFERS)
def test_wrong_buffers(case, tmp_path, convert):
    by_buffer(tmp_path / "theirs", change=WRONG_BUFFERS[case])
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert "error: " in said and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "something was left behind"


def test_a_call_among_the_counts_is_not_made(tmp_path, convert):
    payload = Call(tmp_path / "executed")
    key = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
    by_buffer(tmp_path / "theirs", change=lambda t, root: t.update({key: payload}))
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "executed or left behind"
