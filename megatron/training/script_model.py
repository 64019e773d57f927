"""A model of a script's own: what its model_provider returns, made ready to be trained as ours is.

It may be the suite's GPT, also with modules replaced or added, or any module of torch. What is not
the GPT of the flags (`Plan.own_model`) is trained in any data-parallel layout; everything that
follows from the flags of the model alone refuses it or counts its parameters.
"""

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from megatron import log
from megatron.config.mup import DECOUPLED_LR_NAMES
from megatron.config.plan.parameters import ParameterSpec
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.model import gpt
from megatron.optimizer.optimizer import EMBEDDINGS
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import GIVEN, Parameter, Sharding, sharding_of
from megatron.training.script_args import get_args
from megatron.training.weight_check import weight_hashes

_chunk: dict[str, Any] = {}  # the arguments of the GPT that model_provider is called for
# Arguments of Megatron's GPTModel that cannot say anything else than the flags.
_PASSED_OVER = (
    "config",
    "transformer_layer_spec",
    "parallel_output",
    "scatter_embedding_sequence_parallel",
    "vp_stage",
    "pg_collection",
)


class GPTModel(gpt.GPTModel):
    """The GPT of the flags, this rank's part of it, for a model_provider to return or to change.

    It takes the arguments of Megatron's class, and refuses with a ValueError those that say
    something else than the flags. Parameters have no values yet while model_provider runs.
    """

    def __init__(
        self,
        config: Any = None,
        transformer_layer_spec: Any = None,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if not _chunk:
            raise RuntimeError("GPTModel: it can be made in model_provider alone")
        _check_arguments(
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            **kwargs,
        )
        super().__init__(**_chunk)
        self._as_built = _facts(self)

    def is_as_built(self) -> bool:
        """Has nobody derived a class from this one, or put something else into it: a module, a
        parameter, an activation or another attribute, a hook?"""
        facts = _facts(self)
        return (
            type(self) is GPTModel
            and len(facts) == len(self._as_built)
            and all(map(operator.is_, facts, self._as_built))
        )


def _facts(model: nn.Module) -> list[object]:
    """What the modules are made of, and have been given, one after the other. Objects that are kept
    here keep their identity."""
    facts: list[object] = []
    for module in model.modules():
        facts.append(module)
        for name, value in vars(module).items():
            if name not in ("training", "_as_built"):
                facts += value.values() if isinstance(value, dict) else [value]
    return facts


def _check_arguments(**arguments: Any) -> None:
    """Raise ValueError for arguments of a GPT that say something else than the flags."""
    m = _chunk["config"]
    expected = {
        "vocab_size": get_args().padded_vocab_size,
        "max_sequence_length": m.max_position_embeddings or m.seq_length,
        "pre_process": _chunk["chunk"].first,
        "post_process": _chunk["chunk"].last,
        "fp16_lm_cross_entropy": _chunk["precision"].fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": m.tied,
        "position_embedding_type": m.positions,
        "rotary_percent": m.rotary_percent,
        "rotary_base": m.rotary_base,
    }
    for name, value in arguments.items():
        if value is None or name in _PASSED_OVER:
            continue
        # 0 types of tokens, or the value of the flag of that name, asks for nothing
        if name not in expected and value and value != getattr(get_args(), name, None):
            raise ValueError(f"GPTModel: {name} has no effect here; leave it out [model-argument]")
        if name in expected and value != expected[name]:
            raise ValueError(
                f"GPTModel: {name} is {value}, by the flags {expected[name]}; change the flag, or "
                "leave the argument out [model-argument]"
            )


def build(
    provider: Callable[..., Any],
    config: Config,
    ctx: ParallelContext,
    device: torch.device,
    chunks: Sequence[dict[str, Any]],
) -> list[nn.Module]:
    """The models that `provider` returns for this rank, one for each of the `chunks`, which are the
    arguments of our GPT for them; their parameters are on the device, and have a `sharding`.

    The provider is called as Megatron calls it, with those of pre_process, post_process, vp_stage,
    config (`get_args()`) and pg_collection (`ctx`) that it has a parameter for. torch's random
    numbers begin with --seed, alike on every rank. Raises ValueError for what is no model.
    """
    models = []
    for number, arguments in enumerate(chunks):
        offered = {
            "pre_process": arguments["chunk"].first,
            "post_process": arguments["chunk"].last,
            "vp_stage": number if len(chunks) > 1 else None,
            "config": get_args(),
            "pg_collection": ctx,
        }
        parameters = inspect.signature(provider).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = offered if takes_all else offered.keys() & {p.name for p in parameters}
        torch.manual_seed(config.training.seed)
        _chunk.update(arguments)
        try:
            model = provider(**{name: offered[name] for name in names})
        finally:
            _chunk.clear()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model_provider: returned {type(model).__name__}; return one torch.nn.Module "
                "[model-provider-result]"
            )
        _move(model, device, arguments["dtype"])
        _give_records(model, ctx)
        models.append(model)
    return models


def _move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move what is not of the suite, as it came: numbers with a fraction get `dtype`."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if hasattr(p, "sharding"):
                continue
            if not p.is_floating_point():
                raise ValueError(
                    f"model_provider: parameter {name} of {type(module).__name__} is {p.dtype}, "
                    "not trainable; make it a buffer [model-provider-result]"
                )
            p.data = p.data.to(device, dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if not type(module).__module__.startswith("megatron."):
                setattr(
                    module, name, buffer.to(device, dtype if buffer.is_floating_point() else None)
                )


def _give_records(model: nn.Module, ctx: ParallelContext) -> None:
    """Parameters without a record are whole on every rank, and keep the values they came with.
    Megatron's mark `sequence_parallel` says that a tensor-parallel rank sees part of the tokens."""
    for name, p in model.named_parameters():
        if not hasattr(p, "sharding"):
            marked = ctx.sequence_parallel and getattr(p, "sequence_parallel", False)
            partial = ("tp",) if marked else ()
            record = Sharding(name, tuple(p.shape), partial=partial, init=GIVEN)
            cast(Parameter, p).sharding = record


def plan_of(plan: Plan, models: Sequence[nn.Module], config: Config, ctx: ParallelContext) -> Plan:
    """The plan of the models that were built: as it was where they are the GPT of the flags, else
    with their own parameters. Raises ValueError for what works with the GPT of the flags alone, and
    where ranks have other parameters."""
    if all(isinstance(model, GPTModel) and model.is_as_built() for model in models):
        return plan
    (model, *_) = models
    for flag, needs in _refused(model, config, ctx):
        raise ValueError(
            f"{flag}: needs {needs}, and the script's model_provider returned "
            f"{type(model).__name__}, another model; omit it, or return GPTModel as it is "
            "[own-model]"
        )
    if config.parallel.overlap_param_gather:
        log.warn_once(
            "--overlap-param-gather: without effect on a model of the script's own, which may read "
            "a weight outside of the module that has it; weights are gathered after each step "
            "[own-model-gathers-at-once]"
        )
    _compare(model, ctx)
    records = [(sharding_of(p), p.requires_grad) for p in model.parameters()]
    table = tuple(
        ParameterSpec(
            s.name,
            s.shape,
            s.splits,
            partial=s.partial,
            real_rows=s.real_rows,
            frozen=not trained,
        )
        for s, trained in records
    )
    return replace(plan, parameters=table, own_model=type(model).__name__)


def _refused(model: nn.Module, config: Config, ctx: ParallelContext) -> Iterator[tuple[str, str]]:
    """(flag, what it needs) of what a model of one's own cannot have."""
    flags = "the GPT of the flags"
    if ctx.pp.size > 1:
        yield f"--pipeline-model-parallel-size {ctx.pp.size}", flags
    if config.optimizer.optimizer == "muon":
        yield "--optimizer muon", flags
    if config.optimizer.train_only:
        yield "--train-only", flags
    if config.model.use_mup:
        yield "--use-mup", flags
    names = {sharding_of(p).name for p in model.parameters()}
    for flag, is_set, acts_on in (
        ("--decoupled-lr", config.optimizer.decoupled_lr is not None, DECOUPLED_LR_NAMES),
        ("--embed-grad-scale", config.model.embed_grad_scale != 1.0, EMBEDDINGS),
    ):
        if is_set and names.isdisjoint(acts_on):
            yield flag, f"a parameter named {' or '.join(acts_on)}"
    if isinstance(model, gpt.GPTModel):
        return
    remedy = "our GPTModel, also with changes"
    if ctx.cp.size > 1:
        yield f"--context-parallel-size {ctx.cp.size}", remedy
    split = any(sharding_of(p).splits for p in model.parameters())
    if ctx.tp.size > 1 and not split:
        yield f"--tensor-model-parallel-size {ctx.tp.size}", "layers that are split over ranks"
    for flag, refused_by in {
        "--num-experts": config.model.num_experts,
        "--torch-compile": config.training.torch_compile,
        "--fp8-format": config.precision.fp8,
        "--recompute-granularity": config.training.recompute,
        **dict.fromkeys(config.scored_by, True),
        "numbers of subsets (--packed-samples, --log-subsets, --log-format)": config.counts_subsets,
    }.items():
        if refused_by:
            yield flag, remedy


def _compare(model: nn.Module, ctx: ParallelContext) -> None:
    """Raise ValueError where ranks have other parameters, or other values of those that came with
    values. All ranks call this."""
    initial = [p for p in model.parameters() if sharding_of(p).init == GIVEN]
    records = [(sharding_of(p).name, sharding_of(p).shape) for p in model.parameters()]
    text = repr((records, weight_hashes(initial)))
    digests = gather_objects(hashlib.sha256(text.encode()).hexdigest(), ctx.world)
    ranks = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if ranks:
        raise ValueError(
            f"model_provider: the model of rank {', '.join(ranks)} has other parameters or "
            "initial values than that of rank 0; draw them from torch's random numbers, which "
            "every rank begins alike [model-differs-between-ranks]"
        )
