"""What files say against a command line before torch is loaded: one line each, exit code 2, in a
fraction of a second."""

import functools
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config import command_line, saved_flags
from megatron.config.data import DataConfig
from megatron.data.indexed_dataset import idx_path
from megatron.features.registry import RunConfig
from megatron.training import preflight
from megatron.training.checkpointing import resume_checks
from tests.forkrun import ROOT, RanksFailed
from tests.problems import assert_problem, assert_reported, codes_of, raises
from tests.runs import SMALL, plot, train, with_flags, write_text

BASE = [*SMALL, "--train-iters", "8", "--lr-decay-iters", "8", "--eval-iters", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two pairs, and the checkpoint of 4 iterations of a run on the first."""
    folder = tmp_path_factory.mktemp("preflight")
    for seed, name in enumerate(("a", "b")):
        write_text(folder / name, 300, seed)
    train(
        folder,
        [
            *BASE,
            "--data-path",
            str(folder / "a"),
            "--save",
            str(folder / "save"),
            "--save-interval",
            "4",
            "--exit-interval",
            "4",
        ],
    )
    return folder


def refused(capsys, argv: list[str]) -> list[str]:
    """The lines that end this command line; none where it may run."""
    line = command_line.read(argv, {}, tree=RunConfig)
    capsys.readouterr()
    try:
        preflight.check(line)
    except SystemExit as leave:
        assert leave.code == 2
    return capsys.readouterr().err.splitlines()


def resumed(folder: Path, *extra: str) -> list[str]:
    return with_flags(
        [*BASE, "--data-path", str(folder / "a"), "--load", str(folder / "save")], *extra
    )


@pytest.mark.parametrize(
    "flag", ["mock_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
)
def test_a_tokenizer_without_an_end_of_document_token(flag, monkeypatch):
    monkeypatch.setattr(preflight, "tokenizer_from", lambda data: SimpleNamespace(eod=None))
    with raises(ValueError, "flag-not-with-tokenizer", f"--{flag.replace('_', '-')}"):
        preflight.build_tokenizer(SimpleNamespace(data=DataConfig(**{flag: True})))
    assert preflight.build_tokenizer(SimpleNamespace(data=DataConfig())).eod is None


def test_it_runs_before_torch_is_loaded(folder):
    """The whole program: nothing of torch is imported where the schedule contradicts the
    checkpoint."""
    code = (
        "import sys, pretrain_gpt\n"
        "try:\n    pretrain_gpt.main(sys.argv[1:])\nexcept SystemExit as leave:\n"
        "    print(leave.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *resumed(folder, "--lr-decay-iters", "9")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 False\n" and done.stderr.count("\n") == 1
    assert_reported(done.stderr, "schedule-differs-from-checkpoint", "9 iterations", "8 iterations")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([], []),
        (["--finetune", "--hidden-size", "64", "--lr", "1"], []),
        (["--lr", "1", "--override-opt_param-scheduler"], []),
        (["--lr", "1", "--no-load-optim"], []),
        (["--train-iters", "80"], []),  # of a constant weight decay
        (["--optimizer", "sgd", "--no-load-optim"], []),
        (["--optimizer", "sgd"], ["optimizer-differs-from-checkpoint"]),
        (["--hidden-size", "64"], ["flag-contradicts-checkpoint"]),
        (["--lr", "1"], ["schedule-differs-from-checkpoint"]),
        (
            ["--global-batch-size", "16"],
            ["consumed-samples-differ", "schedule-differs-from-checkpoint"],
        ),
        (
            ["--vocab-size", "215", "--hidden-size", "64"],
            ["flag-contradicts-checkpoint", "checkpoint-of-another-tokenizer"],
        ),
    ],
)
def test_flags_against_a_checkpoint(folder, capsys, extra, said):
    lines = refused(capsys, resumed(folder, *extra))
    assert codes_of(lines) == said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        # Megatron's own sentence, to the letter
        (
            "--num-layers 3",
            "num_layers value from checkpoint (2) is not equal to the input argument value (3).",
        ),
        ("--normalization RMSNorm", "normalization value from checkpoint (LayerNorm)"),
        ("--no-bias-gelu-fusion", "value from checkpoint (gelu (tanh))"),
        ("--position-embedding-type rope", "value from checkpoint (learned_absolute)"),
        # not the size of a head, nor the scale of attention, which follow from it
        ("--hidden-size 64", "hidden_size value from checkpoint"),
        ("--num-attention-heads 2", "num_attention_heads value from checkpoint"),
    ],
)
def test_what_was_typed_and_only_that_is_named(folder, capsys, flags, named):
    [line] = refused(capsys, resumed(folder, *flags.split()))
    assert named in line and len(re.findall(r"\w+ value from checkpoint", line)) == 1
    assert codes_of([line]) == ["flag-contradicts-checkpoint"]


def test_a_tokenizer_is_named_by_its_files():
    saved = {"class": "GPT2BPETokenizer", "files": ["a/vocab.json"], "sha256": ["1" * 64]}
    other = {**saved, "files": ["b/vocab.json"], "sha256": ["2" * 64]}
    problem = functools.partial(resume_checks.vocabulary_problem, "run", saved)
    code = "checkpoint-of-another-tokenizer"
    assert_problem(problem(other), code, "--load run", "a/vocab.json", "b/vocab.json")
    line = problem({**saved, "sha256": ["2" * 64]})
    assert_problem(line, code, "a/vocab.json")
    line = problem({**saved, "class": "SentencePieceTokenizer"})
    assert_problem(line, code, "GPT2BPETokenizer", "SentencePieceTokenizer")
    assert "1" * 9 not in problem(other) + line
    assert problem({**saved, "files": ["b/vocab.json"]}) is problem(saved) is None


def test_what_had_no_effect_in_the_run_of_the_checkpoint_is_no_difference(
    folder, capsys, monkeypatch
):
    read = saved_flags.read

    def of_version_0_1_0(*words):
        saved = read(*words)
        model = replace(saved.config.model, rotary_base=500)
        return replace(saved, config=replace(saved.config, model=model))

    monkeypatch.setattr(saved_flags, "read", of_version_0_1_0)
    assert refused(capsys, resumed(folder)) == []


def test_a_newer_snapshot_counts_and_what_is_damaged_does_not(folder, tmp_path, capsys):
    """The schedule to compare with is that of the checkpoint that a load would take."""
    argv = [
        *BASE,
        "--mock-data",
        "--save",
        str(tmp_path / "save"),
        "--save-interval",
        "100",
        "--snapshot-interval",
        "3",
        "--exit-interval",
        "4",
    ]
    train(tmp_path, argv)
    loads = with_flags(argv, "--load", str(tmp_path / "save"), "--lr", "1")
    shutil.rmtree(tmp_path / "save/iter_0000004")
    (tmp_path / "save/latest_checkpointed_iteration.txt").unlink()
    assert len(refused(capsys, loads)) == 1
    (slot,) = (tmp_path / "save/snapshots").glob("*/iter_0000003")
    (slot / "state.json").write_text("{}")
    assert refused(capsys, loads) == []


def test_a_blend_without_weights_that_is_too_small(folder, tmp_path, capsys):
    """Known at the start, with flags that help: those that are named do run."""
    short = [
        *BASE,
        "--data-path",
        str(folder / "a"),
        str(folder / "b"),
        "--split",
        "80,10,10",
        "--train-iters",
        "400",
        "--lr-decay-iters",
        "400",
        "--eval-iters",
        "2",
        "--eval-interval",
        "100",
    ]
    train_line, valid = refused(capsys, short)
    iterations = train_line.partition("lower --train-iters to ")[2].partition(",")[0]
    assert_problem(train_line, "data-exhausted", "of train", "3200", "--data-order epoch")
    assert_problem(valid, "data-exhausted", "of valid", "reads 80", "--eval-iters")
    assert len(refused(capsys, with_flags(short, "--eval-iters", "20"))) == 3
    assert refused(capsys, with_flags(short, "--data-order", "epoch")) == []
    weighted = with_flags(short, "--data-path", "1", str(folder / "a"), "1", str(folder / "b"))
    assert refused(capsys, weighted) == []
    assert (
        refused(capsys, with_flags(short, "--dataloader-type", "cyclic", "--eval-iters", "1")) == []
    )
    fits = with_flags(
        short, "--train-iters", iterations, "--eval-iters", "0", "--micro-batch-size", "8"
    )
    assert refused(capsys, fits) == []
    done = train(tmp_path, fits)
    assert done.rows[-1]["iteration"] == int(iterations)
    assert len(refused(capsys, with_flags(fits, "--train-iters", str(int(iterations) + 1)))) == 1


def test_a_dry_run_ends_with_what_is_not_on_this_machine(folder, tmp_path, capsys):
    """Its exit code is 0: a laptop plans for a cluster that has the files."""

    def last_line(*words: str) -> str:
        plot().main([*BASE, *words, "--dry-run"])
        return capsys.readouterr().out.splitlines()[-1]

    away = last_line("--data-path", str(tmp_path / "away"), "--save", "/dev/null/x")
    assert "2 lines" in away and "exit code" in away
    assert "exit code" not in last_line("--data-path", str(folder / "a"))


@pytest.mark.parametrize(
    ("data", "other", "differs"),
    [
        ("--data-path 1 a 2 b --data-order epoch", "--data-path 1 a 3 b", True),
        ("--data-path a --data-order epoch", "--train-iters 400", False),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("--data-path a", "--train-iters 400", True),  # read more often
                ("--data-path a", "--seed 1235", True),
                ("--data-path 1 a 2 b", "--data-path 2 a 1 b", True),
                ("--data-path a b", "--data-path b a", True),
                ("--data-path a --dataloader-type cyclic", "--micro-batch-size 1", True),
                ("--mock-data", "--seed 1235", True),
            )
        ),
    ],
)
def test_a_dry_run_compares_the_order_of_a_resumes_data_as_the_run_does(
    folder, tmp_path, capsys, data, other, differs
):
    """The flags of the checkpoint, others, and others with leave to change the order."""

    def words(text: str) -> list[str]:
        return [str(folder / word) if word in ("a", "b") else word for word in text.split()]

    def ended(argv: list[str]) -> list[str]:
        capsys.readouterr()
        try:
            plot().main([*argv, "--dry-run"])
            return []
        except SystemExit as leave:
            assert leave.code == 2
            return codes_of(capsys.readouterr().err.splitlines())

    run = f"--lr-decay-style constant --save {tmp_path}/run --load {tmp_path}/run --save-interval 4"
    first = [*with_flags(BASE, *words(run)), *words(data)]
    train(tmp_path / "first", [*first, "--exit-interval", "4"])
    changed = [*with_flags(first, *words(other)), "--override-opt_param-scheduler"]
    caches = sorted(folder.rglob("*.npy"))
    assert ended(first) == ended([*changed, "--allow-data-order-change"]) == []
    assert ended(changed) == ["data-order-differs"] * differs
    assert sorted(folder.rglob("*.npy")) == caches
    with pytest.raises(RanksFailed, match=r"\[data-order-differs\]") if differs else nullcontext():
        train(tmp_path / "again", [*changed, "--exit-interval", "8"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--seq-length", "40000", "--max-position-embeddings", "40000"], "data-too-small"),
        (["--split", "1,1,1", "--data-order", "epoch", "--eval-iters", "1"], None),
        (["--data-path", "/nowhere/a"], None),
        (["--data-args-path", "/nowhere/list"], None),
    ],
)
def test_a_dry_run_refuses_data_that_are_here_and_cannot_be_used(folder, words, code, capsys):
    data = [] if "path" in words[0] else ["--data-path", str(folder / "a")]
    argv = with_flags([*BASE, *data], *words, "--dry-run")
    try:
        plot().main(argv)
        assert code is None
    except SystemExit as leave:
        assert leave.code == 2
    said = capsys.readouterr()
    assert codes_of(said.err.splitlines()) == ([code] if code else [])
    assert ("on this machine a real run would stop" in said.out) == ("path" in words[0])


def test_a_damaged_index_and_ids_of_another_vocabulary(folder, tmp_path, capsys):
    words = with_flags(BASE, "--data-path", str(folder / "a"), "--vocab-size", "100")
    [line] = refused(capsys, words)
    assert_problem(line, "token-id-out-of-range", "0 .. 210", "100")
    prefix = write_text(tmp_path / "c", 20)
    Path(idx_path(prefix)).write_bytes(Path(idx_path(prefix)).read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"c\.idx"):
        preflight.check(command_line.read([*BASE, "--data-path", prefix], {}, tree=RunConfig))
