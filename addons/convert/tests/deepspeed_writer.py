"""Writes checkpoints as Megatron-DeepSpeed's ranks do, for the converter's tests: weights in one
file per tensor-parallel rank, or per layer; ZeRO's optimizer in one per model- and data-parallel
rank. The format is DeepSpeed's (compared with files that DeepSpeed 0.19.8 wrote)."""

from __future__ import annotations

import argparse
import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.addons.convert.tests.argument_sets import DEEPSPEED, arguments_of
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import parameter_table

State = dict[str, torch.Tensor]
MODULES = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
NUMELS = 4  # numbers to which it pads a group, per data-parallel rank


def rank_parts(tensors: Mapping[str, torch.Tensor], model: ModelConfig, tp: int) -> list[State]:
    """The tensors of each tensor-parallel rank under our names."""
    rows = tensors["embedding.word_embeddings.weight"].shape[0]
    splits = {one.name: dict(one.splits).get("tp") for one in parameter_table(model, rows, rows)}
    ranks: list[State] = [{} for _ in range(tp)]
    for name, whole in tensors.items():
        pieces = [whole] * tp if splits[name] is None else whole.chunk(tp, splits[name])
        for rank, piece in zip(ranks, pieces, strict=True):
            gated = piece.dim() == 3 or (name.endswith("linear_fc1.bias") and piece.dim() == 2)
            rank[name] = (piece.flatten(0, 1) if gated else piece).clone()
    return ranks


def arguments(model: ModelConfig, rows: int, tp: int, pp: int, **more: Any) -> argparse.Namespace:
    """What Megatron-DeepSpeed saves of its command line."""
    own = dict(
        normalization=model.normalization.lower(),
        tokenizer_type="NullTokenizer",
        vocab_size=rows,
        padded_vocab_size=rows,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.float32,
    )
    return argparse.Namespace(**arguments_of(DEEPSPEED, model, **own | more))


def in_layer(name: str) -> tuple[int, str]:
    """Number of the layer, and the name in its file."""
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return int(layer), f"{MODULES[module]}.{kind}"


def nested(rank: State) -> dict:
    """The state dict of its model without a pipeline."""
    embedding: dict = {}
    encoder: dict = {}
    language = {"embedding": embedding, "encoder": encoder}
    for name, x in rank.items():
        if name.startswith("embedding."):
            _, table, kind = name.split(".")
            embedding[table] = {kind: x}
        elif name.startswith("output_layer"):
            language["output_layer"] = {"weight": x}
        elif "final_layernorm" in name:
            encoder[name.removeprefix("decoder.")] = x
        else:
            layer, rest = in_layer(name)
            encoder[f"layers.{layer}.{rest}"] = x
    return {"language_model": language}


def parameter_name(name: str) -> str:
    """The name of a parameter of ours in its model without a pipeline."""
    if not name.startswith("decoder.layers."):
        return "language_model." + name.replace("decoder.", "encoder.")
    layer, rest = in_layer(name)
    return f"language_model.encoder.layers.{layer}.{rest}"


def in_file(name: str, layers: int) -> tuple[int, str]:
    """Number of the file of its pipeline that has a parameter of ours, and its name there."""
    if name.startswith("embedding."):
        return 1, name.removeprefix("embedding.")
    if name.startswith("output_layer"):
        return layers + 6, "lm_head.weight"
    if "final_layernorm" in name:
        return layers + 5, name.rpartition(".")[2]
    layer, rest = in_layer(name)
    return 3 + layer, rest


def pipe_name(name: str, layers: int, tied: bool) -> str:
    """The name of a parameter of ours in its pipeline."""
    number, path = in_file(name, layers)
    if number == 1 and tied:
        return f"tied_modules.embed.{path}"
    return f"{number}.{path}"


@dataclass(frozen=True)
class Adam:
    """An optimizer to write: by kind (fp32_param, exp_avg, exp_avg_sq) the tensors under our names;
    data-parallel ranks; updates; what more goes into the root and its loss scaler."""

    states: Mapping[str, State]
    dp: int
    step: int
    scaler: Any = None
    elastic: bool = False


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[dict[str, type]]:
    """Classes that pickle under the names of DeepSpeed's, in this block."""
    names = {
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    }
    modules = {path: types.ModuleType(path) for path in names}
    found = {}
    for path, classes in names.items():
        for name in classes:
            found[name] = type(name, (_Plain,), {"__module__": path})
            setattr(modules[path], name, found[name])
    parents = {path.rsplit(".", depth)[0] for path in names for depth in (1, 2, 3)}
    with mock.patch.dict(
        sys.modules, {path: types.ModuleType(path) for path in parents - {""}} | modules
    ):
        yield found


class _Plain:
    def __init__(self, **values: Any):
        vars(self).update(values)


def zero_files(
    groups: list[list[str]], kinds: Mapping[str, State], adam: Adam, classes: Mapping[str, type]
) -> list[dict]:
    """The files of the data-parallel ranks of one model-parallel rank. `groups`: names of the
    parameters with weight decay and without; `kinds`: their tensors."""
    files = [{"maps": [], "fp32": [], "state": {}} for _ in range(adam.dp)]
    for number, names in enumerate(groups):
        starts = {}
        at = 0
        for name in names:
            starts[name] = at, kinds["fp32_param"][name].numel()
            at += starts[name][1]
        size = -(-at // (NUMELS * adam.dp)) * NUMELS  # numbers of a part
        flat = {}
        for kind, tensors in kinds.items():
            flat[kind] = torch.zeros(size * adam.dp)
            flat[kind][:at] = torch.cat([tensors[name].reshape(-1).float() for name in names])
        for d, file in enumerate(files):
            slices = {}
            for name, (start, numel) in starts.items():
                first = max(start, d * size)
                last = min(start + numel, (d + 1) * size)
                if first < last:
                    address = {"start": first - d * size, "numel": last - first}
                    slices[name] = classes["fragment_address"](**address)
            held = max(0, min(size, at - d * size))  # without padding
            part = {kind: x[d * size : (d + 1) * size].clone() for kind, x in flat.items()}
            file["maps"].append(slices)
            file["fp32"].append(part["fp32_param"][:held].clone())
            file["state"][number] = {
                "step": torch.tensor(float(adam.step)),
                **{
                    kind: part[kind][:held].clone() if adam.elastic else part[kind]
                    for kind in ("exp_avg", "exp_avg_sq")
                },
            }
    for file in files:
        param_groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]} for _ in groups]
        base: Any = {"state": file["state"], "param_groups": param_groups}
        if adam.elastic:
            base = [
                {kind: x for kind, x in one.items() if kind != "step"}
                for one in file["state"].values()
            ]
        scaler = {"cur_scale": 1.0, "dynamic": False} if adam.scaler is None else adam.scaler
        kind = "DynamicLossScaler" if scaler["dynamic"] else "LossScaler"
        file["root"] = {
            "loss_scaler": classes[kind](**scaler),
            "dynamic_loss_scale": scaler["dynamic"],
            "overflow": False,
            "base_optimizer_state": base,
            "base_optimizer_state_step": adam.step,
            "single_partition_of_fp32_groups": file["fp32"],
            "zero_stage": 1,
            "partition_count": [adam.dp for _ in groups],
            "ds_version": "0.14.0",
            "param_slice_mappings": file["maps"],
        }
    return [file["root"] for file in files]


def write_files(
    step: Path,
    tensors: State,
    model: ModelConfig,
    tp: int,
    pp: int,
    *,
    adam: Adam | None = None,
    args: Mapping[str, Any] | None = None,
    **root: Any,
) -> None:
    """A checkpoint in the folder `step`; pp 0: without DeepSpeed's pipeline."""
    step.mkdir(parents=True)
    layers = model.num_layers
    ranks = rank_parts(tensors, model, tp)
    rows = tensors["embedding.word_embeddings.weight"].shape[0]
    common = {
        "args": arguments(model, rows, tp, max(pp, 1), **(args or {})),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.14.0",
    } | root
    for m in range(tp * max(pp, 1)):
        module = None if pp else nested(ranks[m])
        torch.save(common | {"module": module}, step / f"mp_rank_{m:02d}_model_states.pt")
    for t in range(tp if pp else 0):
        files: dict[int, State] = {}
        for name, x in ranks[t].items():
            number, path = in_file(name, layers)
            files.setdefault(number, {})[path] = x
        for number, held in files.items():
            torch.save(held, step / f"layer_{number:02d}-model_{t:02d}-model_states.pt")
    if adam is not None:
        with deepspeed_classes() as classes:
            _write_optimizer(step, tensors, model, tp, pp, adam, classes)


def _write_optimizer(
    step: Path,
    tensors: State,
    model: ModelConfig,
    tp: int,
    pp: int,
    adam: Adam,
    classes: Mapping[str, type],
) -> None:
    layers = model.num_layers
    tied = not model.untie_embeddings_and_output_weights
    states = {kind: rank_parts(one, model, tp) for kind, one in adam.states.items()}
    low = next(iter(tensors.values())).dtype == torch.bfloat16
    for m in range(tp * max(pp, 1)):
        p, t = divmod(m, tp)
        named = {}
        for name in tensors:
            number = in_file(name, layers)[0]
            first = number == 1
            stage = min(max(number - 3, 0), layers - 1) * max(pp, 1) // layers
            if stage == p or (tied and first and p == pp - 1):
                named[name] = pipe_name(name, layers, tied) if pp else parameter_name(name)
        kinds = {
            kind: {named[name]: one[t][name] for name in named} for kind, one in states.items()
        }
        decay = [named[name] for name in named if kinds["exp_avg"][named[name]].dim() > 1]
        groups = [decay, [name for name in named.values() if name not in decay]]
        for d, state in enumerate(zero_files(groups, kinds, adam, classes)):
            name = f"zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
            what = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.14.0"}
            torch.save(what, step / (f"bf16_{name}" if low else name))
