"""Megatron's flags on a command line, and its table of arguments, which a run prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.addons.megatron_cli.flags import FOREIGN
from megatron.arguments import config_from, parse, to_args_text
from megatron.config import command_line
from megatron.config.tree import Config
from megatron.features.registry import RunConfig
from megatron.training.logging.printed_arguments import start_lines
from tests.forkrun import ROOT
from tests.problems import assert_problem

GOLDEN = ROOT / "tests" / "golden"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32"
)
GOOD = (
    f"{SHAPE} --micro-batch-size 2 --train-iters 10 --lr 1e-3 --log-format megatron "
    "--mock-data --vocab-size 100"
)
# The seed's own command line (its launcher's part left out).
SEED = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --seq-length 1024 --max-position-embeddings 1024
    --train-iters 1000 --lr-decay-iters 320000 --save ./checkpoints/gpt-2 --load ./checkpoints/gpt-2
    --data-path ./data/meg-gpt2_text_document --vocab-file ./data/gpt2-vocab.json --merge-file ./data/gpt2-merges.txt
    --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --recompute-activations --log-interval 10
    --save-interval 1 --eval-interval 1 --eval-iters 10 --fp16 --log-format megatron"""


def read(flags: str, **environ: str) -> command_line.CommandLine:
    return command_line.read(flags.split(), environ, tree=RunConfig)


@pytest.mark.parametrize("flag", ["--vision-pretraining", "--batch-size 8", "--zero-stage 4"])
def test_a_flag_that_trains_another_model_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        read(f"{GOOD} {flag}")
    [line] = capsys.readouterr().err.splitlines()
    assert_problem(line, "megatron-flag-not-supported", flag.split()[0])


def test_typed_and_foreign_flags_stay_apart_and_have_their_notes():
    line = read(
        f"{GOOD} --no-persist-layer-norm --use-mcore-models --DDP-impl local --tp-comm-overlap-cfg x"
    )
    assert line.foreign == {
        "no_persist_layer_norm": True,
        "use_mcore_models": True,
        "DDP_impl": "local",
        "tp_comm_overlap_cfg": "x",
    }
    assert (
        line.typed["num_layers"] == 2
        and "use_mcore_models" not in line.typed
        and "seed" not in line.typed
    )
    [note] = line.notes
    assert_problem(
        note,
        "megatron-flag-has-no-effect",
        *("--no-persist-layer-norm", "--use-mcore-models", "--tp-comm-overlap-cfg x"),
    )
    assert line.config == read(GOOD).config


@pytest.fixture
def seed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> command_line.CommandLine:
    """The seed's command line, read in a directory that has its files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in (
        "meg-gpt2_text_document.idx",
        "meg-gpt2_text_document.bin",
        "gpt2-vocab.json",
        "gpt2-merges.txt",
    ):
        (tmp_path / "data" / name).touch()
    return read(SEED)


def dump_of(line: command_line.CommandLine) -> dict[str, str]:
    """{name: value} of the dump that a run prints."""
    text = next(text for text in start_lines(line, "gloo") if "end of arguments" in text)
    return {row.split()[0]: row.split(" ", 4)[4] for row in text.splitlines()[1:-1]}


def test_the_seeds_command_line_gives_the_seeds_dump(seed_line):
    """Every line of ours stands in the seed's, in its order; only names of models not trained here
    are left out."""
    seed = [row.rstrip() for row in (GOLDEN / "seed_dump.txt").read_text().splitlines()]
    text = next(text for text in start_lines(seed_line, "gloo") if "end of arguments" in text)
    ours = [row.rstrip() for row in text.splitlines()]
    assert ours == [row for row in seed if row in set(ours)]
    left_out = {row.split()[0] for row in seed if row not in set(ours)}
    foreign = FOREIGN
    unknown = {name for name in left_out if name not in foreign}  # of boards, if it is deleted
    assert {name for name in unknown if not re.search("tensorboard|wandb", name)} == set()
    assert left_out - unknown == {
        name for name, flag in foreign.items() if "trained here, only GPT" in flag.text
    }
    assert len(ours) == 262 - len(left_out)


def test_the_first_lines_are_megatrons(seed_line):
    lines = start_lines(seed_line, "gloo")
    assert lines[0] == (
        "using world size: 1, data-parallel size: 1, context-parallel size: 1 "
        "tensor-model-parallel size: 1, pipeline-model-parallel size: 1 "
    )
    assert lines[1] == "using torch.float16 for parameters ..."
    assert lines[2].splitlines()[0] == "------------------------ arguments ------------------------"
    assert (
        lines[2].splitlines()[-1] == "-------------------- end of arguments ---------------------"
    )
    assert lines[3:] == ["setting number of micro-batches to constant 2"]
    lines = start_lines(read(GOOD + " --bf16", WORLD_SIZE="4", RANK="0"), "gloo")
    assert lines[1:4] == [
        "setting global batch size to 8",
        "accumulate and all-reduce gradients in fp32 for bfloat16 data type.",
        "using torch.bfloat16 for parameters ...",
    ]
    assert lines[5:] == ["setting number of micro-batches to constant 1"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "",
            {
                "params_dtype": "torch.float32",
                "ffn_hidden_size": "256",
                "kv_channels": "16",
                "global_batch_size": "2",
                "dataloader_type": "single",
                "tokenizer_type": "NullTokenizer",
                "start_weight_decay": "0.01",
                "end_weight_decay": "0.01",
                "recompute_granularity": "None",
                "no_load_optim": "None",
                "mock_data": "True",
                "overlap_p2p_comm": "False",
                "encoder_num_layers": "2",
                "encoder_seq_length": "32",
                "rank": "0",
                "world_size": "1",
                "distributed_backend": "gloo",
                "split": "1,1,1",
            },
        ),
        ("--swiglu", {"ffn_hidden_size": "128", "swiglu": "True"}),
        (
            "--bf16",
            {"params_dtype": "torch.bfloat16", "accumulate_allreduce_grads_in_fp32": "True"},
        ),
        ("--fp64", {"params_dtype": "torch.float64", "fp64": "True"}),
        (
            "--use-rotary-position-embeddings --rotary-base 500000",
            {
                "position_embedding_type": "rope",
                "use_rotary_position_embeddings": "True",
                "rotary_base": "500000",
            },
        ),
        (
            "--no-position-embedding",
            {"position_embedding_type": "none", "add_position_embedding": "False"},
        ),
        ("--disable-bias-linear", {"add_bias_linear": "False", "bias_gelu_fusion": "False"}),
        ("--apply-query-key-layer-scaling", {"attention_softmax_in_fp32": "True"}),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
            {"start_weight_decay": "0.0", "end_weight_decay": "0.1"},
        ),
        (
            "--sequence-parallel",
            {"sequence_parallel": "False", "virtual_pipeline_model_parallel_size": "None"},
        ),
        (
            "--dry-run --world-size 2 --num-layers 8 --pipeline-model-parallel-size 2 "
            "--global-batch-size 8 --num-layers-per-virtual-pipeline-stage 2",
            {
                "overlap_p2p_comm": "True",
                "virtual_pipeline_model_parallel_size": "2",
                "num_layers_per_virtual_pipeline_stage": "2",
                "transformer_pipeline_model_parallel_size": "2",
            },
        ),
        (
            "--dry-run --world-size 2 --pipeline-model-parallel-size 2 "
            "--no-overlap-p2p-communication",
            {"overlap_p2p_comm": "False", "virtual_pipeline_model_parallel_size": "None"},
        ),
        (
            "--no-save-rng --load x --save x --save-interval 5 --no-load-optim",
            {"no_save_rng": "True", "no_load_optim": "True", "no_load_rng": "None"},
        ),
        (
            "--device cuda --distributed-backend nccl",
            {"distributed_backend": "nccl", "device": "cuda"},
        ),
        (
            "--decoupled-lr 0.5 --decoupled-min-lr 0.1 --qk-layernorm --apply-wd-to-qk-layernorm",
            {"decoupled_lr": "0.5", "decoupled_min_lr": "0.1", "apply_wd_to_qk_layernorm": "True"},
        ),
        (
            "--geglu --ffn-multiple-of 8 --recompute-modules mlp moe --recompute-activations",
            {
                "ffn_multiple_of": "8",
                "recompute_modules": "['mlp', 'moe']",
                "tiktoken_num_special_tokens": None,
                "decoupled_lr": None,
            },
        ),
        ("--no-persist-layer-norm", {"no_persist_layer_norm": "True"}),
        ("--train-range-to-skip 2 3", {"train_range_to_skip": "[2, 3]"}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": "1",
            },
        ),
        (
            "--initial-loss-scale 65536 --fp16",
            {"initial_loss_scale": "65536.0", "params_dtype": "torch.float16"},
        ),
    ],
)
def test_the_dump_has_megatrons_values_after_its_own_checks(flags, expected):
    found = dump_of(read(f"{GOOD} {flags}"))
    assert {name: found.get(name) for name in expected} == expected


def test_new_names_stand_in_the_dump_only_when_set():
    new = {
        "fp64",
        "mock_data",
        "device",
        "rotary_base",
        "geglu",
        "log_format",
        "metrics_file",
        "ddp_bucket_size",
    }
    seed = {row.split()[0] for row in (GOLDEN / "seed_dump.txt").read_text().splitlines()[1:-1]}
    plain = dump_of(read(GOOD))
    assert set(plain) - seed == {"mock_data"}
    more = dump_of(
        read(
            f"{GOOD} --fp64 --device cpu --use-rotary-position-embeddings --rotary-base 7 --geglu --log-format aurora "
            "--metrics-file m --ddp-bucket-size 9 --ckpt-format torch"
        )
    )
    assert set(more) - seed == new | {"ckpt_format"}
    ramp = (
        GOOD.replace("--train-iters 10", "--train-samples 100")
        + " --rampup-batch-size 2 2 20 --global-batch-size 8"
    )
    found = dump_of(read(ramp))
    assert found["rampup_batch_size"] == "['2', '2', '20']" and found["train_iters"] == "None"


def test_what_a_checkpoint_sets_is_said_in_megatrons_words(tmp_path):
    words = ["--swiglu", *GOOD.split()]
    config = config_from(Config, parse(command_line.parser(), words).typed)
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (folder / "args").write_text(to_args_text(config))
    (folder / "manifest.json").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    line = read(f"{GOOD} --load {tmp_path} --use-checkpoint-args")
    assert "Setting swiglu to True from checkpoint" in line.notes


@pytest.mark.parametrize(
    ("flags", "dumped", "changed"),
    [("", 1, 0), ("--print-arguments changed", 0, 1), ("--print-arguments none", 0, 0)],
)
def test_print_arguments_with_megatrons_format(flags, dumped, changed):
    words = f"{GOOD} {flags}".split()
    line = command_line.read(words, {}, tree=RunConfig)
    text = "\n".join(start_lines(line, "gloo"))
    assert text.count("end of arguments") == dumped and text.count("--num-layers 2") == changed


def test_the_old_name_of_the_flag_still_works():
    words = GOOD.replace("--log-format megatron", "--log-dialect aurora").split()
    line = command_line.read(words, {}, tree=RunConfig)
    assert line.config.logging.log_format == "aurora" and line.notes == []
