"""Megatron's flags that have no field here: read as others, accepted without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.arguments import ForeignFlags, Parser, ReadAs, flags_of, parse
from megatron.config.tree import Config

from . import flags as compat
from .deepspeed import read_deepspeed

HEADS = {  # of the tables of docs/flags.md
    compat.NO_EFFECT: """
## Flags of Megatron-LM that are accepted without effect

The results are the same without them. A run lists those that were given in one paragraph at the
start.
""",
    compat.MORE: """
## Flags of Megatron-LM that request less precision or memory than is used

They are accepted; the paragraph at the start of a run says what each costs, and `--dry-run` shows
the bytes.
""",
    compat.READ_AS: """
## Flags of Megatron-LM that are read as others

Older spellings, and flags of its forks. A flag that is named first and given itself wins.
""",
    compat.REFUSED: """
## Flags of Megatron-LM that are refused

Ignoring them would train another model or lose data. The error says what to use.
""",
}


def foreign_flags() -> ForeignFlags:
    """Those of `tables.py`."""
    return ForeignFlags(
        compat.parser_flags(),
        compat.explain,
        compat.ignores,
        compat.SYNONYMS,
        read_as,
        changes_nothing,
        refused,
        "docs/from_megatron.md",
        tables,
        argument_table,
    )


def refused() -> dict[str, list[str]]:
    """As `ForeignFlags.refused`: single flags, and families of which no flag is here."""
    spellings: dict[str, list[str]] = {}
    for flag in compat.FOREIGN.values():
        if flag.verdict == compat.REFUSED:
            spellings.setdefault(flag.text, []).append(flag.spelling)
    for verdict, starts, text in compat.prefixes():
        if verdict == compat.REFUSED:
            spellings.setdefault(text, []).extend(f"{start}*" for start in starts)
    return spellings


def changes_nothing(name: str, value: Any) -> bool:
    """Whether an argument of this name is known, and not with this value refused or read as a flag
    that makes it another model."""
    flag = compat.FOREIGN.get(name)
    if flag is None or name == "enable_gpt_oss" and value:  # a checkpoint may be of ModelOpt's
        return False
    if flag.shown(value) is None:
        return True
    words = flag.text.split() if flag.verdict == compat.READ_AS else ()
    of_model = any(own.trained and own.spelling in words for own in flags_of(Config).values())
    return flag.verdict != compat.REFUSED and not of_model


def argument_table(values: dict[str, Any], foreign: Mapping[str, Any]) -> dict[str, Any]:
    """As `ForeignFlags.argument_table`."""
    if values.get("log_format") == "megatron":  # Megatron's has no such name
        del values["log_format"]
    return values | compat.dumped(foreign)


def tables() -> dict[str, list[tuple[Sequence[str], str]]]:
    """As `ForeignFlags.tables`: one for each verdict, families of flags at its end. Of those that
    are refused the error says why, and the page only the names."""
    rows: dict[str, list[tuple[Sequence[str], str]]] = {}
    for verdict, head in HEADS.items():
        flags = sorted(compat.FOREIGN.values(), key=lambda flag: flag.spelling)
        rows[head] = [
            ((flag.spelling, *flag.aliases), "" if verdict == compat.REFUSED else flag.reason)
            for flag in flags
            if flag.verdict == verdict
        ]
        rows[head] += [
            ([f"{start}*" for start in starts], "" if verdict == compat.REFUSED else text)
            for kind, starts, text in compat.prefixes()
            if kind == verdict
        ]
    return rows


def read_as(
    parser: Parser, typed: dict[str, Any], foreign: dict[str, Any], ignored: Sequence[str]
) -> ReadAs:
    """As `ForeignFlags.read_as`."""
    typed, foreign, dense = _dense(typed, foreign)
    if "hybrid_layer_pattern" in typed:
        foreign = {name: value for name, value in foreign.items() if not _hybrid(name, value)}
    typed, bigcode = _bigcode(parser, typed, foreign)
    typed, foreign, gpt_oss, differing = _gpt_oss(parser, typed, foreign)
    typed, foreign, shorter, too_long = _run_length(typed, foreign)
    seq_length = max(1, typed.get("seq_length") or 1)
    for words in compat.replaced(foreign, seq_length).values():
        typed = parse(parser, words).typed | typed
    typed, problems = _with_deepspeed(parser, typed, foreign.get("deepspeed_config"))
    notes = compat.accepted(foreign, ignored, seq_length)
    if notes and "log_format" not in typed:
        notes.append(
            "this command line is Megatron-LM's; --log-format megatron prints its log, too "
            "[log-format-of-megatron]"
        )
    notes += [*dense, *bigcode, *gpt_oss, *shorter]
    return ReadAs(typed, [*compat.refused(foreign), *differing, *too_long, *problems], notes)


# Megatron-DeepSpeed's, of experts.
_OF_EXPERTS = frozenset(
    "create_moe_param_group use_tutel topk noisy_gate_policy enable_expert_tensor_parallelism "
    "disable_moe_token_dropping moe_expert_parallel_size moe_loss_coeff moe_train_capacity_factor "
    "moe_eval_capacity_factor moe_min_capacity".split()
)


def _hybrid(name: str, value: Any) -> bool:
    """Does a flag only say that layers are those of --hybrid-layer-pattern?"""
    stacks = ("hybrid_stack_spec", "mamba_stack_spec")
    return name == "is_hybrid_model" or (name == "spec" and value[-1] in stacks)


def _dense(
    typed: dict[str, Any], foreign: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(`typed` and `foreign`, notes) of a model with one expert, which is in Megatron-DeepSpeed one
    without experts: its flags of experts do nothing there. Megatron's own has a router then."""
    expert_flags = foreign.keys() & _OF_EXPERTS
    if typed.get("num_experts") != 1 or not expert_flags:
        return typed, foreign, []
    note = (
        "--num-experts 1: no experts, as in Megatron-DeepSpeed, whose flags of experts have no "
        "effect then [megatron-flag-has-no-effect]"
    )
    typed = {name: value for name, value in typed.items() if name != "num_experts"}
    return typed, {name: v for name, v in foreign.items() if name not in expert_flags}, [note]


def _bigcode(
    parser: Parser, typed: dict[str, Any], foreign: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """(`typed`, notes) of a command line for BigCode's Megatron-LM, which alone has
    --tokenizer-file: its tokenizer is a tokenizer.json, and --fim-rate is enough to fill in the
    middle."""
    if "tokenizer_file" not in foreign:
        return typed, []
    words = []
    if typed.get("tokenizer_type") == "TokenizerFromFile":
        typed = {name: value for name, value in typed.items() if name != "tokenizer_type"}
        words += ["--tokenizer-type", "HuggingFaceTokenizer"]
    if typed.get("fim_rate") == 0:
        typed = {name: value for name, value in typed.items() if name != "fim_rate"}
    elif "fim_rate" in typed and "fim_data" not in typed:
        words += ["--fim-data", "--fim-keep-special-tokens"]
        if "fim_split_sample" in typed:
            words += ["--fim-fragment-rate", "0.5"]
    if not words:
        return typed, []
    note = (
        f"--tokenizer-file {foreign['tokenizer_file']}: a command line for BigCode's Megatron-LM, "
        f"read with {' '.join(words)} [megatron-flag-has-no-effect]"
    )
    return parse(parser, words).typed | typed, [note]


# What Megatron-LM's ModelOpt builder sets for --enable-gpt-oss (megatron/post_training).
_GPT_OSS = (
    "--position-embedding-type yarn --rotary-scaling-factor 32 --beta-fast 32 --beta-slow 1 "
    "--original-max-position-embeddings 131072 --mscale 1 --mscale-all-dim 0 "
    "--no-yarn-correction-range-round-to-int"
)


def _gpt_oss(
    parser: Parser, typed: dict[str, Any], foreign: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """(`typed` and `foreign` without --enable-gpt-oss, notes, problems).

    Megatron-LM has its YaRN in models that its ModelOpt builder makes; all others, so those that
    pretrain_gpt.py trains from scratch, have the positions of the other flags.
    """
    if not foreign.get("enable_gpt_oss"):
        return typed, foreign, [], []
    without = {name: value for name, value in foreign.items() if name != "enable_gpt_oss"}
    if not (foreign.get("modelopt_enabled") or "export_kd_teacher_load" in typed | foreign):
        note = (
            "--enable-gpt-oss: no effect, as in Megatron-LM, where only ModelOpt's models "
            "(--modelopt-enabled) have its YaRN; give --rope-type yarn --rotary-scaling-factor 32 "
            "--no-yarn-correction-range-round-to-int for that of the published gpt-oss "
            "[megatron-flag-has-no-effect]"
        )
        return typed, without, [note], []
    yarn = parse(parser, _GPT_OSS.split()).typed
    spellings = {flag.name: flag.spelling for flag in parser.flags}
    kind = typed.get("position_embedding_type")
    given = typed if kind not in (None, "rope") else typed | {"position_embedding_type": "yarn"}
    differing = [
        f"{spellings[name]} {given[name]}: --enable-gpt-oss has {value}; omit one of the two "
        "[flag-contradicts-gpt-oss]"
        for name, value in yarn.items()
        if given.get(name, value) != value
    ]
    note = f"--enable-gpt-oss = {_GPT_OSS} [megatron-flag-has-no-effect]"
    return given | yarn, without, [note], differing


def _run_length(
    typed: dict[str, Any], foreign: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """(`typed` and `foreign` with one of --train-tokens and another length of the run, notes,
    problems): in Megatron-DeepSpeed the run ends with the shorter one.

    Without a decay of its own the schedule would follow the longer one.
    """
    tokens = foreign.get("train_tokens")
    name = next((n for n in ("train_iters", "train_samples") if typed.get(n)), None)
    if tokens is None or name is None:
        return typed, foreign, [], []
    samples = typed[name] * (typed.get("global_batch_size", 0) if name == "train_iters" else 1)
    flag = f"--{name.replace('_', '-')} {typed[name]}"
    if 0 < samples * typed.get("seq_length", 0) <= tokens:
        return typed, {n: v for n, v in foreign.items() if n != "train_tokens"}, [], []
    has_decay = typed.get("lr_decay_samples") or foreign.get("lr_decay_tokens")
    if name == "train_samples" and typed.get("seq_length") and has_decay:
        note = (
            f"{flag}: the run ends before, with --train-tokens {tokens} "
            "[megatron-flag-has-no-effect]"
        )
        return {n: v for n, v in typed.items() if n != "train_samples"}, foreign, [note], []
    problem = (
        f"--train-tokens {tokens} and {flag}: two lengths of the same run, of which the tokens may "
        "be the shorter one; give only one of them [two-run-lengths]"
    )
    return typed, foreign, [], [problem]


def _with_deepspeed(
    flags: Parser, typed: dict[str, Any], path: str | None
) -> tuple[dict[str, Any], list[str]]:
    """(typed flags and those of the JSON file of --deepspeed_config, problems)."""
    if path is None:
        return typed, []
    try:
        words, problems = read_deepspeed(path)
    except OSError as error:
        missing = f"--deepspeed_config {path}: {error.strerror or error}; give a JSON file"
        return typed, [] if typed.get("dry_run") else [f"{missing} [file-not-readable]"]
    deepspeed = parse(flags, words)
    problems += [f"--deepspeed_config {path}: {line}" for line in deepspeed.problems]
    for name, value in deepspeed.typed.items():
        if typed.get(name, value) != value:
            flag = next(flag.spelling for flag in flags.flags if flag.name == name)
            problems.append(
                f"{flag} {typed[name]}: --deepspeed_config {path} says {value}; make them agree "
                "[flag-contradicts-deepspeed-config]"
            )
    return deepspeed.typed | typed, problems
