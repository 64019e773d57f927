"""Every rule about values and combinations of flags; all violations are reported together.

A problem is one line: flag and value, what is wrong, what to write instead. Rules are
Megatron-LM's, and this suite's own where Megatron would build something else than
what was requested. Files: `checks/paths.py`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from megatron.config.checks import declared, model, schedule, services
from megatron.config.checks import paths as check_paths
from megatron.config.checks.facts import Facts
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import freeze, parameter_table
from megatron.config.tree import Config

Rule = Callable[[Facts], Iterable[str]]
WOULD_STOP = "a real run would stop: "  # notes of a dry run


def problems(config: Config, world_size: int, typed: Collection[str] = ()) -> list[str]:
    """Everything that keeps this command line from running on `world_size` ranks, one line each; []
    if nothing does.

    `typed`: names of the fields the user gave (a value other than its default can be wrong only
    because it was given). Missing files are problems only of a real run, not with --dry-run.
    """
    facts = Facts(config, world_size, typed)
    rules = [*_RULES, *(rule for rule, _ in _of_few_runs(facts))]
    lines = [line for rule in rules for line in rule(facts)]
    for group in config.of_features:
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
    for _, notes_on in _of_few_runs(facts):
        lines += notes_on(facts)
    lines += services.read_skips(facts)[1]
    if config.training.dry_run:
        lines += [f"{WOULD_STOP}{line}" for line in check_paths.missing(config)]
    return lines


def _train_only(config: Config) -> Iterator[str]:
    try:
        freeze(parameter_table(config.model, 1), config.optimizer.train_only)
    except ValueError as error:
        yield str(error)


def _of_few_runs(f: Facts) -> Iterator[tuple[Rule, Rule]]:
    """Rules and notes about flags that few command lines have; their modules are loaded then."""
    if f["fp8"] is not None:
        from megatron.config.checks import fp8

        yield fp8.rule, _nothing
    # gradients or moments in other dtypes than fp32
    dtypes = (f["main_grads_dtype"], f["exp_avg_dtype"], f["exp_avg_sq_dtype"])
    if f["use_precision_aware_optimizer"] or set(dtypes) != {"fp32"}:
        from megatron.config.checks import low_precision

        yield low_precision.rule, low_precision.notes
    if f["optimizer"] == "muon":
        from megatron.config.checks import muon

        yield muon.rule, _nothing
    # several ranks, or flags about them
    has_ranks = f["world_size"] is not None or f["dry_run"] or f.world_size > 1
    if has_ranks or f.config.parallel != ParallelConfig():
        from megatron.config.checks import layout

        yield layout.rule, layout.notes
    if f["replication"] or f["non_persistent_ckpt_type"] == "local":
        from megatron.config.checks import local_copies

        yield local_copies.rule, _nothing
    # attention or modules other than the default ones, or graphs
    if (
        f["use_flash_attn"]
        or not f["masked_softmax_fusion"]
        or f["attention_backend"] != "auto"
        or f["transformer_impl"] != "local"
        or f.config.kernels.cuda_graphs
    ):
        from megatron.config.checks import kernels

        yield kernels.rule, kernels.notes


def _nothing(f: Facts) -> Iterable[str]:
    return ()


_RULES = (
    declared.required,
    declared.limits,
    declared.required_and_excluded,
    model.shape,
    model.precision,
    schedule.length_and_batch,
    schedule.learning_rate,
    model.recompute,
    services.skipped,
)
