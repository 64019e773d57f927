"""Every rule about values and combinations of flags; all violations are reported together.

A problem is one line: flag and value, what is wrong, what to write instead. Rules are
Megatron-LM's, and this suite's own where Megatron would build something else than
what was requested. Files: `checks/paths.py`.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol, runtime_checkable

from megatron.config.checks import declared, model, schedule, services
from megatron.config.checks import paths as check_paths
from megatron.config.checks.facts import Facts
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import freeze, parameter_table
from megatron.config.tree import Config

WOULD_STOP = "a real run would stop: "  # notes of a dry run


@runtime_checkable
class HasRules(Protocol):
    """A group of flags that has rules of its own, as features do."""

    def check(self, facts: Facts) -> Iterable[str]:
        """One line for each problem."""


def problems(config: Config, world_size: int, typed: Collection[str] = ()) -> list[str]:
    """Everything that keeps this command line from running on `world_size` ranks, one line each; []
    if nothing does.

    `typed`: names of the fields the user gave (a value other than its default can be wrong only
    because it was given). Missing files are problems only of a real run, not with --dry-run.
    """
    facts = Facts(config, world_size, typed)
    lines = [line for rule in _RULES for line in rule(facts)]
    for group in vars(config).values():
        if isinstance(group, HasRules):
            lines += group.check(facts)
    if config.optimizer.train_only and not lines:  # needs the sizes of a model without problems
        lines += _train_only(config)
    lines += check_paths.problems(config)
    if not config.training.dry_run:
        lines += check_paths.missing(config)
    return list(dict.fromkeys(lines))


def notes(config: Config, world_size: int, typed: Collection[str] = ()) -> list[str]:
    """Warnings for a command line without problems, one line each, but for those of
    `declared.without_effect`."""
    facts = Facts(config, world_size, typed)
    lines: list[str] = []
    if facts["distributed_backend"] not in (None, "gloo") and facts["device"] == "cpu":
        lines.append(
            f"--distributed-backend {facts['distributed_backend']}: no effect with one rank on the "
            "CPU [flag-has-no-effect]"
        )
    blocks = config.model.blocks
    made_again = {name for block in blocks for name in (block.recomputed_as, *block.made_again)}
    ignored = [name for name in facts["recompute_modules"] if name not in made_again]
    if ignored and "recompute_modules" in typed:
        lines.append(
            f"--recompute-modules {' '.join(ignored)}: activations are kept, with the same results "
            "[flag-has-no-effect]"
        )
    lines += model.notes(facts)
    untied = facts["untie_embeddings_and_output_weights"]
    if facts["use_mup"] and untied and facts["decoupled_lr"] is None:
        lines.append(
            "--use-mup and --untie-embeddings-and-output-weights: logits and the learning rate of "
            "the output layer are both divided by the width, as in Megatron-LM, so that wider "
            "models learn less there; --decoupled-lr with the value of --lr keeps its rate "
            "[mup-output-layer-scaled-twice]"
        )
    by_default = "muon_momentum" not in typed and facts["muon_momentum"] == 0.9
    if facts["optimizer"] == "muon" and by_default:
        lines.append(
            f"{facts.say('muon_momentum')}: the default of Megatron-LM's command line; its "
            "OptimizerConfig and torch have 0.95; give the value that is meant "
            "[muon-momentum-ambiguous]"
        )
    if facts["optimizer"] != "sgd" and facts["lr"] > 1:
        lines.append(
            f"{facts.say('lr')}: a step moves a weight by about as much; usual rates are below 0.1 "
            "[lr-very-large]"
        )
    if facts["control_file"] is not None and facts["save"] is None:
        lines.append(
            f"{facts.say('control_file')}: nothing can be saved without --save: save has no "
            "effect, and stop ends the run without a checkpoint [control-file-without-save]"
        )
    if facts["moe_router_force_load_balancing"] and facts["num_experts"]:
        lines.append(
            "--moe-router-force-load-balancing: experts are selected at random, for benchmarks; "
            "do not use the weights [experts-selected-at-random]"
        )
    if _asks_for_layout(facts):
        from megatron.config.checks import layout

        lines += layout.notes(facts)
    if _chooses_kernels(facts):
        from megatron.config.checks import kernels

        lines += kernels.notes(facts)
    if _stores_16_bits(facts):
        from megatron.config.checks import low_precision

        lines += low_precision.notes(facts)
    lines += services.read_skips(facts)[1]
    if config.training.dry_run:
        lines += [f"{WOULD_STOP}{line}" for line in check_paths.missing(config)]
    return lines


def _train_only(config: Config) -> Iterator[str]:
    try:
        freeze(parameter_table(config.model, 1), config.optimizer.train_only)
    except ValueError as error:
        yield str(error)


def _fp8(f: Facts) -> Iterator[str]:
    if f["fp8"] is not None:
        from megatron.config.checks.fp8 import rule

        yield from rule(f)


def _muon(f: Facts) -> Iterator[str]:
    if f["optimizer"] == "muon":
        from megatron.config.checks.muon import rule

        yield from rule(f)


def _stores_16_bits(f: Facts) -> bool:
    """Do flags ask for gradients or moments in other dtypes than fp32?"""
    dtypes = (f["main_grads_dtype"], f["exp_avg_dtype"], f["exp_avg_sq_dtype"])
    return f["use_precision_aware_optimizer"] or set(dtypes) != {"fp32"}


def _low_precision(f: Facts) -> Iterator[str]:
    if _stores_16_bits(f):
        from megatron.config.checks.low_precision import rule

        yield from rule(f)


def _asks_for_layout(f: Facts) -> bool:
    """Are there several ranks, or flags about them?"""
    has_ranks = f["world_size"] is not None or f["dry_run"] or f.world_size > 1
    return has_ranks or f.config.parallel != ParallelConfig()


def _layout(f: Facts) -> Iterator[str]:
    if _asks_for_layout(f):
        from megatron.config.checks.layout import rule

        yield from rule(f)


def _chooses_kernels(f: Facts) -> bool:
    """Do flags ask for attention or modules other than the default ones, or for graphs?"""
    return (
        f["use_flash_attn"]
        or not f["masked_softmax_fusion"]
        or f["attention_backend"] != "auto"
        or f["transformer_impl"] != "local"
        or f.config.kernels.cuda_graphs
    )


def _kernels(f: Facts) -> Iterator[str]:
    if _chooses_kernels(f):
        from megatron.config.checks.kernels import rule

        yield from rule(f)


def _local_copies(f: Facts) -> Iterator[str]:
    if f["replication"] or f["non_persistent_ckpt_type"] == "local":
        from megatron.config.checks.local_copies import rule

        yield from rule(f)


_RULES = (
    declared.required,
    declared.limits,
    declared.required_and_excluded,
    model.shape,
    model.precision,
    _fp8,
    _low_precision,
    _muon,
    _layout,
    schedule.length_and_batch,
    schedule.learning_rate,
    model.recompute,
    _local_copies,
    services.skipped,
    _kernels,
)
