"""The file of --stages: what is wrong with it is said once, by key, before anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.addons.stages.lines import remaining, staged, table
from megatron.addons.stages.stage_file import read_stages
from megatron.arguments import flags_of
from megatron.config.command_line import planned
from megatron.features.registry import RunConfig
from tests.problems import assert_problem, codes_of, raises
from tests.runs import SMALL, with_flags, write_text

FLAGS = flags_of(RunConfig)
LAST = "[[stage]]\n"


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("", "stages-malformed", "stage"),
        ("stage = 3", "stages-malformed", "stage"),
        ("stage = [3]", "stages-malformed", "stage 1"),
        (f"lr = 1\n{LAST}", "stages-malformed", "lr"),
        ("[[stage", "stages-malformed", "TOML"),
        ("[" * 5000, "stages-malformed", "TOML"),
        (f"{LAST}lr = 1\n{LAST}", "stages-malformed", "until_iterations"),
        (f"{LAST}until_tokens = 1\nuntil_samples = 1", "stages-malformed", "until_samples"),
        (f"{LAST}until-tokens = 1\nuntil_tokens = 1", "stages-malformed", "until_tokens"),
        (f"{LAST}until_tokens = 0", "stages-malformed", "until_tokens"),
        (f"{LAST}until_tokens = true", "stages-malformed", "until_tokens"),
        (f'{LAST}until_tokens = "1B"', "stages-malformed", "1B"),
        (f"{LAST}hidden-size = 64", "stage-flag-cannot-change", "hidden-size"),
        (f"{LAST}hidden_size = 64", "stage-flag-cannot-change", "hidden-size"),
        (f"{LAST}tensor-model-parallel-size = 2", "stage-flag-cannot-change", "tensor-model"),
        (f"{LAST}learning-rate = 2", "stage-flag-cannot-change", "learning-rate"),
        (f"{LAST}seed = 2", "stage-flag-cannot-change", "seed"),
        (f"{LAST}lr = []", "stages-malformed", "lr"),
        (f"{LAST}lr = {{a = 1}}", "stages-malformed", "lr"),
        (f"{LAST}use-rope-scaling = false", "stages-malformed", "use-rope-scaling"),
        (f"{LAST}data-path = [[1]]", "stages-malformed", "data-path"),
    ],
)
def test_files_that_are_refused(tmp_path, text, code, named):
    (tmp_path / "file").write_text(text)
    with raises(ValueError, code, named):
        read_stages(str(tmp_path / "file"), FLAGS)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with raises(ValueError, "file-not-readable", str(path)):
            read_stages(str(path), FLAGS)


def a_line(tmp_path, text: str, *more: str):
    """A command line with this file of stages, and the feature's part of it."""
    (tmp_path / "file").write_text(text.replace("DATA", str(tmp_path)))
    argv = with_flags(
        [*SMALL, "--data-path", write_text(tmp_path / "a", 60), "--train-iters", "12"],
        *("--stages", str(tmp_path / "file"), "--save", str(tmp_path / "save")),
        *("--position-embedding-type", "rope", "--max-position-embeddings", "64", *more),
    )
    line, problems = planned(argv, 1, RunConfig)
    assert not problems, problems
    own = next(group for group in vars(line.config).values() if hasattr(group, "stage_file"))
    return replace(line, words=argv), own


def test_ends_in_every_unit(tmp_path):
    """Rounded up to whole iterations: 8 samples of 32 tokens each, then 4 of 64."""
    text = (
        "[[stage]]\nuntil_samples = 17\n[[stage]]\nuntil_tokens = 1025\nseq-length = 64\n"
        "global-batch-size = 4\n[[stage]]\nuntil-iterations = 7\n[[stage]]\n"
    )
    stages = staged(*a_line(tmp_path, text))
    assert [(each.first, each.last) for each in stages] == [(0, 3), (3, 5), (5, 7), (7, 12)]
    assert [each.samples for each in stages] == [(0, 24), (24, 32), (32, 40), (40, 60)]
    assert [each.config.model.seq_length for each in stages] == [32, 64, 64, 64]
    # all count alike
    plans = [each.config.training.step_batch_size_schedule for each in stages]
    assert plans == ["0:8 768:4 1024:4 1280:4", *["0:8 1536:4 2048:4 2560:4"] * 3]
    written = "\n".join(table(*a_line(tmp_path, text)))
    assert all(f"{n:,} tokens" in written for n in (768, 512, 1280))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[[stage]]\nuntil_iterations = 12\n[[stage]]", "stage-ends-malformed"),
        (
            "[[stage]]\nuntil_iterations = 5\n[[stage]]\nuntil_samples = 40\n[[stage]]",
            "stage-ends-malformed",
        ),
        ("[[stage]]\nuntil_iterations = 11", "stage-ends-malformed"),
        ("[[stage]]\nlr = -1", "value-out-of-range"),
        ("[[stage]]\nseq-length = 65", "position-embeddings-shorter-than-sequence"),
        ("[[stage]]\nglobal-batch-size = 9", "batch-not-divisible"),
        ('[[stage]]\ndata-path = ["1", "DATA/a", "1e-9", "DATA/b"]', "stage-data-unread"),
        ('[[stage]]\nuntil_iterations = 3\n[[stage]]\ndata-path = "DATA/c"', "data-not-found"),
    ],
)
def test_lines_that_are_refused(tmp_path, capsys, text, code):
    """What is wrong with any stage ends the program before the first one starts."""
    write_text(tmp_path / "b", 60, seed=1)
    line, own = a_line(tmp_path, text)
    real = replace(
        line, config=replace(line.config, training=replace(line.config.training, dry_run=False))
    )
    with pytest.raises(SystemExit) as left:
        remaining(real, own)
    assert left.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert_problem(said, code)


@pytest.mark.parametrize(
    "words",
    [
        "--mock-data",
        "--dataloader-type cyclic",
        "--rampup-batch-size 4 4 32",
        "--phase-transition-iterations 3",
        "--step-batch-size-schedule 0:8",
        "--continue-data-mix --data-order epoch",
    ],
)
def test_flags_that_exclude_it(tmp_path, words):
    (tmp_path / "file").write_text(LAST)
    argv = [*SMALL, "--data-path", write_text(tmp_path / "a", 60), "--train-iters", "12"]
    argv = with_flags(
        argv, "--stages", str(tmp_path / "file"), "--save", str(tmp_path), *words.split()
    )
    assert "flags-exclude-each-other" in codes_of(planned(argv, 1, RunConfig)[1])


@pytest.mark.parametrize("words", ["3,3", "0,4", "4,12", "4,x", "-1", "4.5", ","])
def test_phases_that_are_refused(tmp_path, words):
    argv = [*SMALL, "--data-path", write_text(tmp_path / "a", 60), "--train-iters", "12"]
    for more in ([], ["--log-accuracy"]):  # whose rule asks features for what they demand
        words_given = [*argv, *more, f"--phase-transition-iterations={words}"]
        assert "stage-ends-malformed" in codes_of(planned(words_given, 1, RunConfig)[1])


def test_a_phase_ends_with_a_checkpoint(tmp_path):
    """Without one the next job would have nothing to go on from."""
    argv = [*SMALL, "--data-path", write_text(tmp_path / "a", 60), "--train-iters", "12"]
    argv += ["--phase-transition-iterations", "4"]
    assert codes_of(planned(argv, 1, RunConfig)[1]) == ["flag-needs-other-flag"]
    assert not planned([*argv, "--save", str(tmp_path / "save")], 1, RunConfig)[1]
