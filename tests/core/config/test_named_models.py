"""`--model NAME` is the published architecture: its count of parameters, and flags that later ones
override."""

import contextlib
import itertools
import re

import pytest

from megatron.arguments import config_from, parse, parse_typed, values_of
from megatron.config import command_line
from megatron.config.checks import rules
from megatron.config.named_models import MODELS, listing, named_model
from megatron.config.plan import fit
from megatron.config.plan.parameters import count_parameters, parameter_table
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from tests.problems import assert_problem, codes_of
from tests.runs import train, with_flags

# Elements of all weights, without buffers and a second copy of tied embeddings. Written down by hand;
# addons/convert/tests/test_named_models.py counts the same in transformers' models.
PUBLISHED = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "pythia-160m": 162322944,
    "pythia-1b": 1011781632,
    "smollm2-135m": 134515008,
    "smollm2-360m": 361821120,
    "smollm2-1.7b": 1711376384,
    "llama2-7b": 6738415616,
    "llama2-13b": 13015864320,
    "llama2-70b": 68976648192,
    "llama3-8b": 8030261248,
    "llama3-70b": 70553706496,
    "llama3.1-405b": 405853388800,
    "llama3.2-1b": 1235814400,
    "llama3.2-3b": 3212749824,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-7b": 7615616512,
    "qwen3-0.6b": 596049920,
    "qwen3-1.7b": 1720574976,
    "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200,
    "qwen3-32b": 32762123264,
    "qwen3-30b-a3b": 30532122624,
    "qwen3-next-80b-a3b": 79674391296,
    "mistral-7b": 7241732096,
    "mixtral-8x7b": 46702792704,
    "olmoe-1b-7b": 6919161856,
    "gemma2-2b": 2614341888,
    "gpt-oss-20b": 20914757184,
    "gpt-oss-120b": 116829156672,
}
RUN = "--mock-data --micro-batch-size 1 --train-iters 2 --lr 1e-3".split()
# in `make test`
QUICK = ("gpt-oss-20b",)


def config_of(*words: str) -> Config:
    """The configuration of a command line, unchecked."""
    return config_from(Config, parse_typed(command_line.parser(), [*words, *RUN]))


def test_every_model_has_the_published_number_of_parameters():
    counts = {}
    for name, model in MODELS.items():
        table = parameter_table(
            config_of("--model", name).model, model.vocab_size, model.vocab_size
        )
        counts[name] = count_parameters(table)
    assert counts == PUBLISHED == {name: model.parameters for name, model in MODELS.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_flags_of_every_model_are_accepted(name):
    notes, problems = command_line.judge(["--model", name, *RUN, "--bf16"], 1)
    assert problems == []
    assert [note for note in notes if "[" in note] == []


def fits(config: Config, world: int, vocab_size: int, limit: int) -> bool:
    """Whether a rank of some layout on so many has at most `limit` bytes, with all that saves
    memory and costs little speed."""
    powers = [2**n for n in range(world.bit_length())]
    experts = powers if config.model.num_experts else [1]
    small = {"use_distributed_optimizer": world > 1, "micro_batch_size": 1}
    small |= {"recompute_granularity": "full", "recompute_method": "uniform"}
    for tp, pp, ep in itertools.product(powers[:4], powers, experts):
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        sizes |= {"expert_model_parallel_size": ep, "sequence_parallel": tp > 1}
        changes = {**values_of(config), **small, "recompute_num_layers": 1, **sizes}
        changed = config_from(Config, changes)
        if tp * pp * ep <= world and not rules.problems(changed, world):
            with contextlib.suppress(ValueError):  # no plan
                if fit.fullest(changed, make_plan(changed, world, vocab_size)).total <= limit:
                    return True
    return False


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.campaign) for n in PUBLISHED],
)
def test_the_gpus_of_the_list_hold_the_model_and_half_as_many_do_not(name):
    model = MODELS[name]
    words = (
        f"--device cuda --bf16 --use-distributed-optimizer --vocab-size {model.vocab_size}".split()
    )
    config = config_of("--model", name, *words)
    plan = make_plan(config, 1, model.vocab_size)
    limit = int((1 - fit.SPARE) * 80 * fit.GIB)
    gpus = 1
    if fit.fullest(config, plan).total > limit:
        gpus = next(2**n for n in range(12) if fits(config, 2**n, model.vocab_size, limit))
    assert gpus == model.gpus


def small(name: str) -> list[str]:
    """Flags that scale the model down, none of a kind that it lacks."""
    flags = named_model(name).words
    changes = {
        "--num-layers": "2",
        "--hidden-size": "64",
        "--ffn-hidden-size": "64",
        "--num-attention-heads": "4",
        "--num-query-groups": "2",
        "--kv-channels": "16",
        "--seq-length": "32",
        "--num-experts": "4",
        "--moe-ffn-hidden-size": "32",
        "--moe-router-topk": "2",
    }
    return [
        word
        for flag, value in changes.items()
        if flag in flags or flag == "--seq-length"
        for word in (flag, value)
    ]


def kinds() -> list[str]:
    """The models of which the small copies differ, each time the first."""
    found: dict[tuple[str, ...], str] = {}
    for name in [*QUICK, *PUBLISHED]:
        words = with_flags(named_model(name).words, *small(name))
        found.setdefault(tuple(sorted(" ".join(words).split(" --"))), name)
    return list(found.values())


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.campaign) for n in kinds()],
)
def test_a_small_copy_trains_with_later_flags(name, tmp_path):
    words = f"--model {name} {' '.join(small(name))} --vocab-size 199 --device cpu".split()
    result = train(tmp_path, [*words, *RUN, "--num-workers", "0", "--log-interval", "1"])
    assert "2 of 2 iterations" in result.log
    assert config_of(*words).model.hidden_size == 64


def test_later_flags_and_the_command_line_win(tmp_path):
    (tmp_path / "my.args").write_text("--model llama3-8b --num-layers 3 --hidden-size 512\n")
    file = f"@{tmp_path / 'my.args'}"
    assert config_of(file).model.num_layers == 3
    assert config_of(file, "--num-layers", "5").model.num_layers == 5
    assert config_of(file, "--num-layers", "5").model.hidden_size == 512
    assert config_of(file).model.ffn_hidden_size == 14336


def test_a_flag_before_the_name_is_replaced_with_a_note():
    parsed = parse(command_line.parser(), ["--num-layers", "2", "--model", "gpt2"])
    assert parsed.typed["num_layers"] == 12
    assert codes_of(parsed.notes) == ["flag-given-twice"]
    assert not parse(command_line.parser(), ["--model", "gpt2", "--num-layers", "2"]).notes


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["--model", "llama-3-8b"], "model-unknown", "llama3-8b"),
        (["--model", "Qwen/Qwen3-0.6B-Base"], "model-unknown", "qwen3-0.6b"),
        (["--model", "zzz"], "model-unknown", "--help models"),
        (["--model"], "value-count-wrong", "--model"),
        (["--model", "gpt2", "gpt2-xl"], "value-count-wrong", "--model"),
        (["--model", "gpt2", "--model", "gpt2-xl"], "flag-given-twice", "gpt2"),
        (["--modle", "gpt2"], "flag-unknown", "--model"),
    ],
)
def test_a_wrong_name_is_one_problem(words, code, names):
    _, problems = command_line.judge([*words, *RUN], 1)
    assert_problem(problems[0], code, names)
    if code != "flag-unknown":
        assert len(problems) == 1


def test_the_vocabulary_is_that_of_the_model_without_a_tokenizer(capsys):
    words = ["--model", "qwen3-0.6b", *RUN, "--dry-run"]
    line = command_line.read(words, {})
    assert line.config.data.vocab_size == 151936
    assert any("--kv-channels 128" in note for note in line.notes)
    assert command_line.read([*words, "--vocab-size", "7"], {}).config.data.vocab_size == 7
    byte = ["--tokenizer-type", "ByteTokenizer"]
    assert command_line.read([*words, *byte], {}).config.data.vocab_size is None


def test_the_help_lists_them(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.read(["--help", "models"], {})
    assert end.value.code == 0
    assert capsys.readouterr().out == listing()
    for name in MODELS:
        assert re.search(rf"  {re.escape(name)} +{PUBLISHED[name]:,} ", listing())
