"""The command line as a user meets it: bad ones end at once with one line a problem, good ones show
what they mean."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.arguments import config_from, parse, to_args_text
from megatron.config import command_line
from megatron.config.tree import Config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.features.registry import RunConfig
from tests.core.data.corpora import write_corpus
from tests.core.data.vocabularies import write_bpe, write_sentencepiece
from tests.problems import assert_problem, codes_of

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32"
)
GOOD = f"{SHAPE} --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"
# The seed's own command line (its launcher's part left out).
SEED = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --seq-length 1024 --max-position-embeddings 1024
    --train-iters 1000 --lr-decay-iters 320000 --save ./checkpoints/gpt-2 --load ./checkpoints/gpt-2
    --data-path ./data/meg-gpt2_text_document --vocab-file ./data/gpt2-vocab.json --merge-file ./data/gpt2-merges.txt
    --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --recompute-activations --log-interval 10
    --save-interval 1 --eval-interval 1 --eval-iters 10 --fp16"""


def start(flags: str | list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    """`python pretrain_gpt.py FLAGS`."""
    words = flags.split() if isinstance(flags, str) else flags
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
        cwd=cwd,
        text=True,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "", **environ},
    )


# Whole command lines that cannot run: code and flag of each line that must come, in order.
BAD = [
    (
        "",
        [
            "flag-missing --num-layers",
            "flag-missing --hidden-size",
            "flag-missing --num-attention-heads",
            "flag-missing --seq-length",
            "flag-missing --max-position-embeddings",
            "flag-missing --micro-batch-size",
            "flag-missing --lr",
            "flag-missing --train-iters",
            "data-missing --data-path",
            "flag-missing --vocab-file",
            "flag-missing --merge-file",
        ],
    ),
    (f"{GOOD} --num-layer 4", ["flag-unknown --num-layer"]),
    (f"{GOOD} --num_layers 4", ["flag-unknown --num_layers"]),
    (f"{GOOD} --learning-rate 1", ["flag-unknown --learning-rate"]),
    (f"{GOOD} --frobnicate", ["flag-unknown --frobnicate"]),
    (f"{GOOD} num-layers 4", ["value-count-wrong --vocab-size"]),
    (f"{GOOD} -fp16", ["flag-unknown -fp16"]),
    (f"{GOOD} --fp16 true", ["value-not-expected --fp16"]),
    (f"{GOOD} --train-iters 1e3", ["value-malformed --train-iters"]),
    (f"{GOOD} --lr", ["value-missing --lr"]),
    (f"{GOOD} --lr-decay-style cosin", ["value-not-a-choice --lr-decay-style"]),
    (f"{GOOD} --rampup-batch-size 1 2", ["value-count-wrong --rampup-batch-size"]),
    (f"{GOOD} @missing.args", ["file-not-readable @missing.args"]),
    (f"{GOOD} --hidden-size 63", ["hidden-size-not-divisible-by-heads --hidden-size"]),
    (
        f"{GOOD} --max-position-embeddings 8",
        ["position-embeddings-shorter-than-sequence --max-position-embeddings"],
    ),
    (f"{GOOD} --global-batch-size 5", ["batch-not-divisible --global-batch-size"]),
    (f"{GOOD} --fp16 --bf16", ["flags-exclude-each-other --fp16"]),
    (f"{GOOD} --train-samples 20", ["two-run-lengths --train-iters"]),
    (f"{GOOD} --lr-warmup-fraction 0.1 --lr-warmup-iters 1", ["two-warmups --lr-warmup-iters"]),
    (f"{GOOD} --min-lr 1", ["lr-above-peak --min-lr"]),
    (f"{GOOD} --attention-dropout 1.5", ["value-out-of-range --attention-dropout"]),
    (
        f"{GOOD} --tensor-model-parallel-size 2",
        ["world-size-does-not-fit-model --tensor-model-parallel-size"],
    ),
    (
        f"{GOOD} --overlap-param-gather",
        [
            "flag-needs-other-flag --overlap-param-gather",
            "flag-needs-other-flag --overlap-param-gather",
        ],
    ),
    (
        f"{GOOD} --recompute-granularity full",
        ["flag-missing --recompute-method", "flag-missing --recompute-num-layers"],
    ),
    (f"{GOOD} --train-range-to-skip 5", ["skip-range-incomplete --train-range-to-skip"]),
    (f"{GOOD} --train-range-to-skip 9 4", ["skip-range-reversed --train-range-to-skip"]),
    (
        f"{GOOD} --use-flash-attn --attention-dropout 0",
        ["flash-attention-needs-16-bit --use-flash-attn"],
    ),
    (
        f"{GOOD} --transformer-impl transformer_engine --device cpu",
        ["cuda-device-needed --transformer-impl"],
    ),
    (
        f"{GOOD} --num-experts 8 --moe-router-topk 9 --disable-bias-linear",
        ["router-topk-above-num-experts --moe-router-topk"],
    ),
    (f"{GOOD} --world-size 8", ["world-size-only-for-dry-run --world-size"]),
    (f"{GOOD} --split 0,1,1", ["split-without-training-data --split"]),
    (f"{GOOD} --tokenizer-type GPT2Tokenizer", ["tokenizer-unknown --tokenizer-type"]),
    (f"{GOOD} --load / --ckpt-step 7", ["checkpoint-step-missing --ckpt-step"]),
    (
        SEED,
        [
            "data-not-found --data-path",
            "tokenizer-file-missing --vocab-file",
            "tokenizer-file-missing --merge-file",
        ],
    ),
    (
        f"{SHAPE} --hidden-size x --fp16 1 --lr 2 --num-head 3 --train-iters 0 --mock-data "
        "--min-lr 3 --eod-maskloss",
        [
            "value-malformed --hidden-size",
            "value-not-expected --fp16",
            "flag-unknown --num-head",
            "flag-unknown --eod-maskloss",
            "flag-missing --micro-batch-size",
            "value-out-of-range --train-iters",
            "lr-above-peak --min-lr",
            "flag-missing --vocab-size",
        ],
    ),
]


# One interpreter gives the script's `pretrain` each command line of argv[1].
TRY_ALL = """
import contextlib, io, json, runpy, sys
pretrain, found = runpy.run_path(PROGRAM)["main"], []
for words in json.loads(sys.argv[1]):
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            pretrain(words)
        except SystemExit as left:
            code = left.code
    found.append([code, out.getvalue(), err.getvalue()])
    assert "torch" not in sys.modules and "numpy" not in sys.modules, words
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> list[list]:
    """[exit code, stdout, stderr] of each of the bad command lines, in an empty directory."""
    code = TRY_ALL.replace("PROGRAM", repr(str(ROOT / "pretrain_gpt.py")))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([flags.split() for flags, _ in BAD])],
        text=True,
        cwd=tmp_path_factory.mktemp("empty"),
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_command_line_ends_at_once_with_a_line_for_each_problem(number, tried):
    lines = BAD[number][1]
    code, out, err = tried[number]
    assert code == 2 and out == "" and "Traceback" not in err
    found = err.splitlines()
    assert len(found) == len(lines), found
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith("error: ")
        assert_problem(line, *expected.split())


@pytest.mark.parametrize("number", [0, len(BAD) - 1])
def test_it_is_so_for_the_program_itself(number, tried, tmp_path):
    done = start(BAD[number][0], tmp_path)
    assert [done.returncode, done.stdout, done.stderr] == tried[number]


def test_only_rank_0_speaks(tmp_path):
    for environ in (
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ):
        done = start(f"{GOOD} --lr x", tmp_path, **environ)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
        for flags in ("--help", f"{GOOD} --dry-run"):
            done = start(flags, tmp_path, **environ)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"WORLD_SIZE": "2", "RANK": "x"}, "launcher-variable-malformed"),
        ({"RANK": "1"}, "launcher-variables-incomplete"),
    ],
)
def test_bad_ranks_are_a_problem_too(environ, code, tmp_path):
    done = start(GOOD, tmp_path, **environ)
    assert done.returncode == 2
    [found] = done.stderr.splitlines()
    assert found.startswith("error: ")
    assert_problem(found, code, "RANK=")


def test_help_needs_no_torch(tmp_path):
    code = (
        "import runpy, sys\nsys.argv = ['pretrain_gpt.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r}, run_name='__main__')\n"
        "except SystemExit as left: print(left.code, 'torch' in sys.modules, 'numpy' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False False" and done.stderr == ""
    for flag in ("--num-layers", "--train-range-to-skip", "--dry-run", "--log-format"):
        assert flag in done.stdout
    assert "--retro-workdir" not in done.stdout and "docs/flags.md" in done.stdout
    assert start(f"{GOOD} --wrong --help", tmp_path).returncode == 0


@pytest.mark.parametrize(
    "launched", ["--local-rank=0", "--local_rank 0", "--local_rank=0", "--local-rank 0"]
)
def test_what_the_launcher_puts_before_the_flags_is_accepted(launched, tmp_path):
    if launched == "--local-rank=0":
        done = start(f"{launched} {GOOD} --dry-run", tmp_path, PYTHONPATH=without_torch(tmp_path))
        assert done.returncode == 0 and done.stderr == ""
    assert read(f"{launched} {GOOD}").config.parallel.local_rank == 0


def without_torch(folder: Path) -> str:
    """A PYTHONPATH for programs that are not to load it, which takes longer than a plan."""
    (folder / "torch.py").write_text("raise ImportError('no torch here')")
    return str(folder)


def test_a_dry_run_needs_nothing_and_prints_the_plan(tmp_path):
    done = start(f"{SEED} --global-batch-size 16 --dry-run --world-size 2", tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert not list(tmp_path.iterdir())
    text = done.stdout
    assert (
        "354,871,296 parameters" in text
        and "padded to 50,304" in text
        and "2 ranks = data 2" in text
    )
    for code in ("data-not-found", "flag-given-twice"):
        assert f"[{code}]" in text
    assert re.search(r"\ndata: .* ./data/meg-gpt2_text_document.idx: ", text)
    plan, _, kernels = text.partition("kernels on this ")
    assert "samples, split 949,50,1" in plan and "\n  cross entropy: " in kernels
    assert "not used" not in kernels


def test_a_dry_run_shows_what_would_be_read(tmp_path):
    prefix = write_corpus(tmp_path / "a", [99] * 50)
    words = f"{GOOD.replace('--mock-data', '')} --split 1,0,0 --data-path {prefix} --dry-run"
    path = without_torch(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = start(words, tmp_path, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done
    row = done.stdout.partition("\ndata:\n")[2].splitlines()[1].split()
    assert row[:4] == ["train", prefix, "50", "4,950"] and row[5:7] == ["100.000", "%"], done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_files_of_flags_and_who_wins(tmp_path):
    (tmp_path / "a.args").write_text(f"# small\n{GOOD} --seed 7\n")
    done = start(
        "--seed 8 @a.args --dry-run --num-layers 3", tmp_path, PYTHONPATH=without_torch(tmp_path)
    )
    assert done.returncode == 0 and "3 layers" in done.stdout


# ---- in this process


def read(flags: str, **environ: str) -> command_line.CommandLine:
    return command_line.read(flags.split(), environ, tree=RunConfig)


def test_ranks_come_from_the_environment():
    assert (read(GOOD).world_size, read(GOOD).rank) == (1, 0)
    line = read(GOOD, WORLD_SIZE="4", RANK="3")
    assert (line.world_size, line.rank) == (4, 3)
    line = read(GOOD, SLURM_NTASKS="8", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert (line.world_size, line.rank) == (2, 1)
    assert read(GOOD + " --dry-run --world-size 16", WORLD_SIZE="4", RANK="0").world_size == 16


@pytest.mark.parametrize(
    ("right", "wrong", "code"),
    [
        ("--num-layers 2", "--num-layers two", "value-malformed"),
        ("--seq-length", "--seqlength", "flag-unknown"),
        ("--train-iters 10", "--train-samples 10k", "value-malformed"),
        ("--mock-data", "--mockdata", "flag-unknown"),
        ("--mock-data", "--tokenizer-type NullTokenizer --data-path", "value-missing"),
    ],
)
def test_a_required_flag_that_could_not_be_read_is_not_called_missing(right, wrong, code, capsys):
    flags = GOOD.replace(right, wrong)
    if "mockdata" in wrong:
        flags += " --tokenizer-type NullTokenizer"
    with pytest.raises(SystemExit) as left:
        read(flags)
    assert left.value.code == 2
    assert codes_of(capsys.readouterr().err.splitlines()) == [code]


# ---- --use-checkpoint-args


def checkpoint(folder: Path, flags: str, iteration: int = 10) -> Path:
    """A checkpoint directory as far as its args go, written as training writes them."""
    config = config_from(Config, parse(command_line.parser(), flags.split()).typed)
    where = folder / f"iter_{iteration:07d}"
    where.mkdir(parents=True)
    (where / "args").write_text(to_args_text(config))
    (where / "manifest.json").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return where


RUN = "--micro-batch-size 1 --train-iters 5 --lr 1e-4 --mock-data"


def test_the_architecture_comes_from_the_newest_checkpoint(tmp_path):
    shape = (
        f"{GOOD} --swiglu --use-rotary-position-embeddings --normalization RMSNorm "
        "--disable-bias-linear --seed 99"
    )
    checkpoint(tmp_path, GOOD, 10)
    checkpoint(tmp_path, shape, 20)
    line = read(f"{RUN} --load {tmp_path} --use-checkpoint-args")
    theirs = read(shape).config
    assert line.config.model == theirs.model
    assert line.config.data.vocab_size == 100
    assert (
        line.config.training.seed,
        line.config.training.train_iters,
        line.config.optimizer.lr,
    ) == (1234, 5, 1e-4)
    [note] = line.notes
    assert "--num-layers 2" in note and "--swiglu" in note and "--seed" not in note
    line = read(f"{RUN} --load {tmp_path} --use-checkpoint-args --ckpt-step 10")
    assert line.config.model == read(GOOD).config.model
    line = read(f"{RUN} --load {tmp_path / 'iter_0000010'} --use-checkpoint-args")
    assert line.config.model == read(GOOD).config.model


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("--hidden-size 128", ["128", "64"]),
        ("--num-layers 3", ["3", "2"]),
        ("--ffn-hidden-size 512", ["512", "256"]),
        ("--num-query-groups 2 --group-query-attention", []),
        ("--use-rotary-position-embeddings", ["rope", "learned_absolute"]),
        ("--max-position-embeddings 64", ["64", "32"]),
        ("--disable-bias-linear", ["(False, False, False)"]),
        ("--normalization RMSNorm", ["RMSNorm", "LayerNorm"]),
        ("--no-bias-gelu-fusion", ["gelu (erf)", "gelu (tanh)"]),
        ("--untie-embeddings-and-output-weights", []),
    ],
)
def test_a_typed_shape_that_differs_from_the_checkpoints_is_an_error(
    typed, values, tmp_path, capsys
):
    checkpoint(tmp_path, GOOD)
    with pytest.raises(SystemExit):
        read(f"{RUN} --load {tmp_path} --use-checkpoint-args {typed}")
    [line] = capsys.readouterr().err.splitlines()
    flags = [word for word in typed.split() if word.startswith("--")]
    assert_problem(line, "flag-contradicts-checkpoint", *flags, *values, tmp_path / "iter_0000010")


def test_what_fits_the_weights_may_be_typed(tmp_path):
    checkpoint(tmp_path, GOOD)
    line = read(
        f"{RUN} --load {tmp_path} --use-checkpoint-args --seq-length 16 --hidden-dropout 0 "
        "--hidden-size 64 --ffn-hidden-size 256 --position-embedding-type learned_absolute "
        "--kv-channels 16"
    )
    assert (line.config.model.seq_length, line.config.model.hidden_dropout) == (16, 0.0)


def test_what_decides_the_ids_comes_from_the_checkpoint_too(tmp_path):
    model = tmp_path / "m"
    model.touch()
    names = "<unk> <s> </s> <mask> <pad> <cls> <sep>"
    tiktoken = (
        f"--tiktoken-pattern v1 --tiktoken-num-special-tokens 9 --tiktoken-special-tokens {names}"
    )
    for kind, flags in (
        ("TikTokenizer", tiktoken),
        ("SentencePieceTokenizer", "--vocab-extra-ids 5"),
    ):
        of_tokenizer = f"--tokenizer-type {kind} --tokenizer-model {model}"
        checkpoint(tmp_path / kind, f"{GOOD} {of_tokenizer} {flags}")
    line = read(
        f"{RUN} --load {tmp_path}/TikTokenizer --use-checkpoint-args "
        "--tiktoken-num-special-tokens 8"
    )
    d = line.config.data
    assert (d.tiktoken_pattern, d.tiktoken_special_tokens) == ("v1", tuple(names.split()))
    assert (d.tiktoken_num_special_tokens, d.tokenizer_model) == (8, str(model))
    assert any("--tiktoken-pattern v1" in note for note in line.notes)
    line = read(f"{RUN} --load {tmp_path}/SentencePieceTokenizer --use-checkpoint-args")
    assert line.config.data.vocab_extra_ids == 5


def test_what_has_no_effect_does_not_come_from_a_checkpoint(tmp_path):
    checkpoint(tmp_path, f"{GOOD} --rotary-base 500 --vocab-extra-ids 5")
    line = read(f"{RUN} --load {tmp_path} --use-checkpoint-args")
    assert codes_of(line.notes[-2:]) == ["flag-has-no-effect"] * 2
    assert line.config.model.rotary_base == 10000 and line.config.data.vocab_extra_ids == 0


BPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 5 --lr 1e-4 --tokenizer-type "
    "GPT2BPETokenizer"
)


def test_the_files_of_the_tokenizer_come_from_the_checkpoint_where_they_still_exist(
    tmp_path, capsys
):
    vocab, merges = write_bpe(tmp_path)
    checkpoint(tmp_path / "run", f"{BPE} --vocab-file {vocab} --merge-file {merges}")
    argv = f"{RUN} --load {tmp_path}/run --use-checkpoint-args"
    line = read(argv)
    assert (line.config.data.vocab_file, line.config.data.merge_file) == (vocab, merges)
    assert planned_vocabulary(line.config.data) == (
        len(json.loads(Path(vocab).read_text())),
        f"--vocab-file {vocab}",
    )
    other = shutil.copy(merges, tmp_path / "other.txt")
    assert read(f"{argv} --merge-file {other}").config.data.merge_file == str(other)
    line = read(f"{argv} --tokenizer-type NullTokenizer --vocab-size 9")
    assert (line.config.data.vocab_file, line.config.data.merge_file) == (None, None)
    os.unlink(vocab)
    for more, expected in (("", 1), (f"--vocab-file {other}", 0)):
        try:
            read(f"{argv} {more}")
        except SystemExit:
            pass
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == expected, lines
        for text in lines:
            assert_problem(text, "tokenizer-file-missing", vocab, "--vocab-file")


def test_without_a_checkpoint_the_command_line_counts(tmp_path, capsys):
    line = read(f"{GOOD} --load {tmp_path} --use-checkpoint-args")
    assert_problem(line.notes[-1], "checkpoint-args-missing", tmp_path)
    with pytest.raises(SystemExit):
        read(f"{RUN} --load {tmp_path} --use-checkpoint-args")
    assert set(codes_of(capsys.readouterr().err.splitlines())) == {"flag-missing"}


def test_a_folder_to_convert_is_the_only_problem(tmp_path, capsys):
    """Flags that the converted checkpoint brings, as --num-layers, are not missing yet."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        read(f"{RUN} --vocab-size 100 --seq-length 16 --load {tmp_path} --use-checkpoint-args")
    [line] = capsys.readouterr().err.splitlines()
    assert_problem(line, "checkpoint-of-another-suite", f"hf-import {tmp_path} DIR")


def test_args_of_a_checkpoint_that_cannot_be_read_are_problems(tmp_path, capsys):
    where = checkpoint(tmp_path, GOOD)
    for text, codes in {
        f"{GOOD} --hidden-size wide --from-the-future 3": ["value-malformed"],
        f"{GOOD} @/etc/passwd": ["checkpoint-args-damaged"],
        "--num-layers 2": ["checkpoint-args-damaged"],
    }.items():
        (where / "args").write_text(text)
        with pytest.raises(SystemExit):
            read(f"{GOOD} --load {tmp_path} --use-checkpoint-args")
        lines = capsys.readouterr().err.splitlines()
        assert codes_of(lines) == codes
        assert all(f"--use-checkpoint-args: {where / 'args'}: " in line for line in lines)
    (where / "args").unlink()
    with pytest.raises(SystemExit):
        read(f"{GOOD} --load {tmp_path} --use-checkpoint-args")
    assert codes_of(capsys.readouterr().err.splitlines()) == ["file-not-readable"]


def test_the_vocabulary_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry = f"{SHAPE} --micro-batch-size 1 --train-iters 5 --lr 1e-4 --dry-run"

    def planned(flags: str):
        return planned_vocabulary(read(f"{dry} {flags}").config.data)

    vocab, merges = write_bpe(tmp_path)
    size = len(json.loads(Path(vocab).read_text()))
    assert planned(f"--vocab-file {vocab} --merge-file {merges}") == (size, f"--vocab-file {vocab}")
    assert planned("--vocab-size 77") == (77, "--vocab-size")
    assert planned("--tokenizer-type TikTokenizer")[0] == 131072
    assert planned("--tokenizer-type ByteTokenizer")[0] == 257
    path = write_sentencepiece(tmp_path)
    for kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        size = build_tokenizer(kind, tokenizer_model=path).vocab_size
        flags = f"--tokenizer-type {kind} --tokenizer-model {path}"
        assert planned(flags) == (size, f"--tokenizer-model {path}")
    for flags in ("", "--vocab-file none.json", "--tokenizer-type Llama2Tokenizer"):
        assert planned(flags)[0] == 50257
    for kind in ("Llama2Tokenizer", "HuggingFaceTokenizer"):
        assert planned(f"--tokenizer-type {kind} --tokenizer-model {merges}")[0] == 50257


def test_main_with_a_callers_own_command_line_leaves_its_streams_and_signals(capsys):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stream = sys.stdout
    pretrain_gpt.main([*GOOD.split(), "--dry-run"])
    assert sys.stdout is stream and "GiB" in capsys.readouterr().out
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
