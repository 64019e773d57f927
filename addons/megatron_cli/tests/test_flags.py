"""Every flag of Megatron's is known here: ours, accepted without effect, or refused; and the
verdict says why."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from megatron.addons.megatron_cli import flags as megatron_flags
from megatron.addons.megatron_cli.flags import (
    FOREIGN,
    MORE,
    NO_EFFECT,
    READ_AS,
    REFUSED,
    prefixes,
)
from megatron.addons.megatron_cli.foreign import changes_nothing
from megatron.arguments import flags_of, parse
from megatron.config import command_line
from megatron.config.checks.data_paths import blend_words
from megatron.config.rope import Yarn
from megatron.data.build import read_blends
from megatron.features.registry import RunConfig
from tests.forkrun import ROOT
from tests.problems import assert_problem, assert_reported, code_of, codes_of

GOLDEN = ROOT / "tests" / "golden"
ROWS = [
    line.split("\t")
    for line in (GOLDEN / "megatron_flags.txt").read_text().splitlines()
    if line[0] != "#"
]
DUMP = (GOLDEN / "seed_dump.txt").read_text().splitlines()[1:-1]
SEED = {line.split()[0]: " ".join(line.split()[2:]) for line in DUMP}
PARSER = command_line.parser(RunConfig)
OURS = flags_of(RunConfig)
# some are those of other features (addons/tests)
KNOWN = [row for row in ROWS if row[2] == "-" or row[2] in PARSER.every_spelling]
ALIASED = {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}
# Derived by Megatron from the launcher or from other flags; our dump derives them too
# (test_command_line).
DERIVED = {
    "consumed_train_samples",
    "consumed_valid_samples",
    "data_parallel_size",
    "params_dtype",
    "rank",
    "transformer_pipeline_model_parallel_size",
    "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size",
    "world_size",
}


def test_the_tables_of_names_are_whole():
    assert len(SEED) == 260 and {name for era, name, *_ in ROWS if era == "2024"} == set(SEED)
    assert sum(era == "newer" for era, *_ in ROWS) == 109


@pytest.mark.parametrize(
    ("era", "name", "spelling", "default"), KNOWN, ids=[f"{row[0]}-{row[1]}" for row in KNOWN]
)
def test_every_name_is_known_under_its_spelling(era, name, spelling, default):
    if spelling == "-":
        assert name in DERIVED
        return
    flag = PARSER.every_spelling[spelling]
    assert flag.name == ALIASED.get(name, name)
    assert (name in FOREIGN) != (flag.name in OURS)


def test_nothing_is_both_ours_and_foreign():
    assert not set(OURS) & set(FOREIGN)
    assert len(PARSER.flags) == len(OURS) and len(PARSER.foreign_flags.flags) == len(FOREIGN)


# The default differs on purpose: the seed's is the older one, where the two versions disagree, or
# both are accepted.
OTHER_DEFAULT = {
    ("newer", "transformer_impl"),
    ("newer", "recompute_modules"),
    # Megatron's is the spelling's own, whatever was typed
    ("removed", "layernorm_epsilon"),
}


@pytest.mark.parametrize(
    ("era", "name", "spelling", "default"), [row for row in ROWS if row[1] in FOREIGN]
)
def test_the_default_is_megatrons_and_typing_it_is_silent(era, name, spelling, default):
    flag = FOREIGN[name]
    shown = list(flag.default) if isinstance(flag.default, tuple) else flag.default
    if (era, name) not in OTHER_DEFAULT and name != "retriever_report_topk_accuracies":
        assert str(shown) == ("" if default == '""' else default)
    assert flag.shown(flag.default) is None
    if flag.takes in ("int", "float", "str") and flag.default is not None:
        typed = parse(PARSER, [f"{spelling}={flag.default}"]).typed
        assert not megatron_flags.refused(typed) and not megatron_flags.accepted(typed)


def test_the_seeds_dump_has_the_defaults_of_the_foreign_flags():
    shown = {
        name: str(list(f.default) if isinstance(f.default, tuple) else f.default)
        for name, f in FOREIGN.items()
    }
    differ = {name for name in SEED if name in FOREIGN and shown[name] != SEED[name]}
    assert differ == {"retriever_report_topk_accuracies"}  # left out


def _typed_otherwise(flag: megatron_flags.ForeignFlag) -> list[str]:
    """The flag as typed with a value that is neither its default nor one of the others that are
    fine."""
    words = {
        "switch": [],
        "off": [],
        "int": ["77"],
        "float": ["0.77"],
        "str": ["other"],
        "list": ["other", "words"],
    }[flag.takes]
    return [flag.spelling, *words]


@pytest.mark.parametrize("name", FOREIGN)
def test_another_value_is_said_in_one_line(name):
    flag = FOREIGN[name]
    argv = _typed_otherwise(flag)
    parsed = parse(PARSER, argv)
    assert not parsed.problems and list(parsed.typed) == [name]
    refused = megatron_flags.refused(parsed.typed)
    noted = megatron_flags.accepted(parsed.typed)
    [line] = refused + noted
    assert " ".join(argv) in line and "\n" not in line and len(line) < 300
    assert bool(refused) == (flag.verdict == REFUSED or bool(flag.only))
    if flag.verdict == MORE:
        assert flag.text in line
    if flag.verdict == REFUSED:
        remedies = (
            "use ",
            "omit ",
            "--",
            "write ",
            "watch ",
            "set ",
            "change ",
            "must hold",
            "copy ",
            "convert ",
        )
        assert any(word in flag.text for word in remedies), "no remedy"
    assert code_of(line) == (
        "megatron-flag-not-supported" if refused else "megatron-flag-has-no-effect"
    )


@pytest.mark.parametrize(
    ("name", "value"), [(flag.name, value) for flag in FOREIGN.values() for value in flag.fine]
)
def test_values_that_happen_here_anyway_are_silent(name, value):
    assert FOREIGN[name].shown(value) is None


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--batch-size", "4"], "--micro-batch-size"),
        (["--model-parallel-size", "2"], "--tensor-model-parallel-size"),
        (["--warmup", "0.01"], "--lr-warmup-fraction"),
        (["--zero-stage", "4"], "--zero-stage 1"),
        (["--train-iters-to-skip", "3"], "--iterations-to-skip"),
        (["--topk", "8"], "--moe-aux-loss-coeff"),
    ],
)
def test_what_a_refusal_recommends(argv, remedy):
    [line] = megatron_flags.refused(parse(PARSER, argv).typed)
    assert remedy in line


@pytest.mark.parametrize(
    ("spelling", "word"),
    [
        ("--moe-new-thing", "mixture-of-experts"),
        ("--retro_project_dir", "only GPT"),
        ("--fp8-param", "fp8"),
        ("--use-flash-attn-v3", "--attention-backend flash"),
        ("--zero-allgather-bucket-size", "DeepSpeed"),
        ("--lion-beta1", "adam, sgd and muon"),
        ("--rl-partial-rollouts", "only pretraining"),
    ],
)
def test_other_flags_of_a_known_family_are_explained(spelling, word):
    [line] = parse(PARSER, [spelling, "1"]).problems
    assert_problem(line, "megatron-flag-not-supported", spelling, word)


@pytest.mark.parametrize(
    ("topic", "use"),
    [
        ("fsdp", "--data-parallel-sharding-strategy"),
        ("mtp", "--mtp-num-layers"),
        ("lora", "--finetune"),
    ],
)
def test_help_of_what_is_not_here_says_what_is_nearest(topic, use):
    assert use in PARSER.help(topic)


def test_an_ordinary_typing_error_is_not_taken_for_a_family():
    [line] = parse(PARSER, ["--num-layer", "1"]).problems
    assert_problem(line, "flag-unknown", "--num-layer", "--num-layers")


def test_the_dump_has_the_flags_of_2024_and_those_that_were_typed():
    plain = megatron_flags.dumped({})
    assert set(plain) == {name for name in SEED if name in FOREIGN and FOREIGN[name].dump}
    assert all(str(value) == SEED[name] for name, value in plain.items())
    typed = parse(PARSER, ["--tp-comm-overlap-cfg", "p", "--ckpt-format", "torch"]).typed
    more = megatron_flags.dumped(typed)
    assert (more["tp_comm_overlap_cfg"], more["ckpt_format"]) == ("p", "torch")


def test_tables_hold_no_code():
    path = Path(megatron_flags.__file__).with_name("tables.py")
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Call)]


def test_every_verdict_is_one_of_four():
    assert {flag.verdict for flag in FOREIGN.values()} == {NO_EFFECT, MORE, READ_AS, REFUSED}
    assert {verdict for verdict, *_ in prefixes()} <= {NO_EFFECT, REFUSED}


@pytest.mark.parametrize("spelling", ["--wandb-host", "--no-tp-comm-x", "--cuda-graph-x"])
def test_flags_of_a_harmless_family_are_noted_with_their_values(spelling):
    parsed = parse(PARSER, [spelling, "a", "b", "--num-layers", "2"])
    assert not parsed.problems and parsed.typed == {"num_layers": 2}
    assert parsed.ignored == [f"{spelling} a b"]
    [line] = megatron_flags.accepted({}, parsed.ignored)
    assert_problem(line, "megatron-flag-has-no-effect", f"{spelling} a b")


BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 "
    "--max-position-embeddings 8 --lr 1e-3 --train-iters 4 --mock-data --vocab-size 100"
)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--save-retain-interval 50 --save s --save-interval 5", "--keep-last 1 --keep-every 50"),
        ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2"),
        ("--attention-head-type multiquery", "--group-query-attention --num-query-groups 1"),
        ("--zero-stage 1", "--data-parallel-sharding-strategy optim"),
        ("--zero-stage 2", "--data-parallel-sharding-strategy optim_grads"),
        ("--zero-stage 3", "--data-parallel-sharding-strategy optim_grads_params"),
        ("--use-torch-fsdp2", "--data-parallel-sharding-strategy optim_grads_params"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
            "--data-parallel-sharding-strategy optim",
        ),
        ("--zero-stage 0", ""),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--rotary-position-embeddings-theta 50000", "--rotary-base 50000"),
        (
            "--activations-checkpoint-method uniform",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
        ("--layernorm-epsilon 1e-6 --norm-epsilon 1e-7", "--norm-epsilon 1e-7"),
        ("--persistent-save-interval 5 --save s", "--save-interval 5"),
        ("--disable-manual-gc-eval", "--no-manual-gc-eval"),
        ("--normalization rmsnorm", "--normalization RMSNorm"),
        ("--most-recent-k 3 --save s --save-interval 5", "--keep-last 3"),
        (
            "--ds-sequence-parallel-size 2 --world-size 2",
            "--context-parallel-size 2 --world-size 2",
        ),
        ("--train-tokens 32 --global-batch-size 1", "--global-batch-size 1"),
        (
            "--no-weight-decay-cond-type qwen3_next --qk-layernorm",
            "--apply-wd-to-qk-layernorm --qk-layernorm",
        ),
    ],
)
def test_what_is_read_in_place_of_another_flag(typed, expected):
    kept = " ".join(typed[typed.find(" --save") :].split()) if " --save" in typed else ""
    got = command_line.read([*BASE.split(), *typed.split(), "--dry-run"], {}, tree=RunConfig).config
    want = command_line.read(
        [*BASE.split(), *expected.split(), *kept.split(), "--dry-run"], {}, tree=RunConfig
    )
    assert got == want.config


def test_tokens_are_whole_samples(capsys):
    """A run's length and its schedule in tokens; a length that another one may exceed is refused."""
    tokens = "--train-tokens 87 --lr-decay-tokens 64 --lr-warmup-tokens 17 --dry-run".split()
    samples = "--train-samples 10 --lr-decay-samples 8 --lr-warmup-samples 2 --dry-run".split()
    base = BASE.replace("--train-iters 4", "").split()
    got, want = (
        command_line.read([*base, *words], {}, tree=RunConfig) for words in (tokens, samples)
    )
    assert got.config == want.config
    longer = command_line.read([*base, *tokens, "--train-samples", "11"], {}, tree=RunConfig)
    assert longer.config == want.config and any("--train-samples 11" in n for n in longer.notes)
    shorter = command_line.read([*base, *tokens, "--train-samples", "9"], {}, tree=RunConfig)
    assert shorter.config.training.train_samples == 9
    for words in ("--train-tokens 31 --global-batch-size 1", "--train-tokens 32"):
        with pytest.raises(SystemExit):
            command_line.read([*BASE.split(), *words.split(), "--dry-run"], {}, tree=RunConfig)
        assert "[two-run-lengths]" in capsys.readouterr().err


def test_a_list_of_auroragpt_is_a_file_of_weights_and_prefixes(tmp_path):
    (tmp_path / "list.txt").write_text("0.25 /data/a_text arxiv\n\n0.75 /data/b_text.bin books\n")
    base = BASE.replace("--mock-data", f"--data-file-list {tmp_path}/list.txt").split()
    read = command_line.read([*base, "--dry-run"], {}, tree=RunConfig).config
    assert read_blends(read.data) == (["/data/a_text", "/data/b_text"], [0.25, 0.75])
    assert blend_words(["0.25 a 0.75", "b"]) == ["0.25", "a", "0.75", "b"]


SWITCHED_OFF = [
    flag
    for flag in [*OURS.values(), *PARSER.foreign_flags.flags]
    if flag.kind in ("off", "switch") and flag.spelling.startswith(("--no-", "--disable-"))
]


@pytest.mark.parametrize("flag", SWITCHED_OFF, ids=[flag.spelling for flag in SWITCHED_OFF])
def test_what_switches_off_has_both_spellings(flag):
    """Megatron's newest versions accept --no-X and --disable-X, X also being the field's name."""
    rest = flag.spelling.removeprefix("--no-").removeprefix("--disable-")
    for word in {rest, flag.name.replace("_", "-") if flag.kind == "off" else rest}:
        for start in ("--no-", "--disable-"):
            parsed = parse(PARSER, [start + word])
            assert not parsed.problems and parsed.typed == {flag.name: flag.kind == "switch"}


def test_a_flag_with_a_value_has_one_spelling():
    [line] = parse(PARSER, ["--disable-rope-freq", "4"]).problems
    assert_problem(line, "flag-unknown", "--disable-rope-freq")


def test_fused_attention_with_dropout_is_the_built_in_one():
    for flags in (["--attention-backend", "fused"], ["--use-flash-attn", "--bf16"]):
        line = command_line.read([*BASE.split(), *flags, "--dry-run"], {}, tree=RunConfig)
        assert line.config.attention_backend == "auto"
        assert [n for n in line.notes if code_of(n) == "fused-attention-with-dropout"]
        line = command_line.read(
            [*BASE.split(), *flags, "--attention-dropout", "0"], {}, tree=RunConfig
        )
        assert line.config.attention_backend == line.config.kernels.attention != "auto"


def test_a_schedule_of_batch_sizes_may_be_several_words():
    words = ["--step-batch-size-schedule", "0:4", "1K:8"]
    base = BASE.replace("--train-iters 4", "--train-samples 400").split()
    read = command_line.read([*base, *words, "--dry-run"], {}, tree=RunConfig).config
    assert read.training.step_batch_size_schedule == "0:4 1K:8"


def test_attention_with_context_parallelism_has_its_own_kernels():
    more = "--context-parallel-size 2 --position-embedding-type rope --bf16 --dry-run".split()
    for flags in (["--attention-backend", "flash"], ["--use-flash-attn"]):
        line = command_line.read(
            [*BASE.split(), *more, *flags, "--world-size", "2"], {}, tree=RunConfig
        )
        assert line.config.kernels.attention == "flash"
        assert line.config.attention_backend == "auto"
        assert [n for n in line.notes if code_of(n) == "attention-backend-with-context-parallel"]


def gpt_oss(*more: str) -> command_line.CommandLine:
    return command_line.read(
        [*BASE.split(), "--enable-gpt-oss", *more, "--dry-run"], {}, tree=RunConfig
    )


def test_gpt_oss_of_modelopt_has_megatrons_yarn(capsys):
    """What megatron/post_training/model_builder.py sets, whatever kind of rotary positions the
    other flags name."""
    for more in ((), ("--position-embedding-type", "rope", "--rope-type", "rope")):
        model = gpt_oss("--modelopt-enabled", *more, "--rotary-base", "150000").config.model
        assert model.yarn == Yarn(
            32.0, 131072, 32.0, 1.0, round(1 + 0.1 * math.log(32), 12), False, 1.0
        )
    for flag, value in (("--rotary-scaling-factor", "40"), ("--beta-fast", "16")):
        with pytest.raises(SystemExit):
            gpt_oss("--modelopt-enabled", flag, value)
        assert_reported(capsys.readouterr().err, "flag-contradicts-gpt-oss", flag, value)
    same = gpt_oss("--modelopt-enabled", "--rotary-scaling-factor", "32").config.model
    assert same.yarn == model.yarn


def test_gpt_oss_without_modelopt_is_what_the_other_flags_say():
    """As in Megatron-LM's pretrain_gpt.py."""
    words = ("--position-embedding-type", "rope")
    line = gpt_oss(*words)
    plain = command_line.read([*BASE.split(), *words, "--dry-run"], {}, tree=RunConfig)
    assert line.config == plain.config and line.config.model.yarn is None
    assert [note for note in line.notes if note.startswith("--enable-gpt-oss")]
    assert not changes_nothing("enable_gpt_oss", True) and changes_nothing("enable_gpt_oss", False)


@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("rotary_position_embeddings_theta", 50000, False),
        ("layernorm_epsilon", 0.1, False),
        ("num_key_value_heads", 2, False),
        ("attention_head_type", "multiquery", False),
        ("attention_head_type", "multihead", True),
        ("rotary_position_embeddings_theta", None, True),
        ("checkpoint_num_layers", 2, True),
        ("zero_stage", 3, True),
        ("load_iteration", 7, True),
        ("train_tokens", 10**9, True),
    ],
)
def test_an_argument_that_is_read_as_a_flag_of_the_model_changes_it(name, value, nothing):
    """A checkpoint of such arguments must not be read as if they were not there."""
    assert changes_nothing(name, value) is nothing


def test_the_tokenizer_of_bigcode(tmp_path):
    for kind in ("TokenizerFromFile", "HuggingFaceTokenizer"):
        words = ["--tokenizer-type", kind, "--tokenizer-file", "x/tokenizer.json", "--dry-run"]
        base = [word for word in BASE.split() if word != "--mock-data"]
        data = command_line.read([*base, *words], {}, tree=RunConfig).config.data
        assert (data.tokenizer, data.tokenizer_model) == ("HuggingFaceTokenizer", words[3])


def test_a_program_without_the_feature_does_not_know_them():
    words = ["--bert-load", "x", "--deepspeed_config", "y", "--moe-of-tomorrow", "1"]
    problems = parse(command_line.parser(), words).problems
    assert codes_of(problems) == ["flag-unknown"] * 3
