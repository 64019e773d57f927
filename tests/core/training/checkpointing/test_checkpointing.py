"""What a resume accepts, refuses and says; the store's own guarantees are in tests/core/checkpoint/."""

import pytest

from megatron.checkpoint import reading
from megatron.config import command_line
from megatron.features.registry import RunConfig
from megatron.training.checkpointing.saved_args import check_architecture
from tests.forkrun import RanksFailed
from tests.runs import SMALL, same_tensors, train, with_flags, write_text

BASE = [
    *SMALL,
    "--train-iters",
    "8",
    "--split",
    "80,20,0",
    "--eval-interval",
    "100",
    "--lr-decay-iters",
    "100",
]

DIFFERS = " differs from the checkpoint: "


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, flags) of a run that stopped after 4 of 8 iterations; its data holds more than one
    epoch's worth."""
    folder = tmp_path_factory.mktemp("trained")
    argv = [
        *BASE,
        "--data-path",
        write_text(folder / "text", 300),
        "--save",
        str(folder / "save"),
        "--save-interval",
        "2",
    ]
    train(folder, [*argv, "--exit-interval", "4"])
    return folder, argv


def resume(trained, tmp_path, *extra: str, drop: tuple[str, ...] = ()):
    """Go on from the trained run into another directory, so that tests do not see each other."""
    folder, argv = trained
    argv = [word for word in argv if word not in drop]
    at = argv.index("--save")
    argv[at + 1] = str(tmp_path / "save")
    return train(tmp_path, [*argv, "--load", str(folder / "save"), *extra])


def refused(trained, tmp_path, *extra: str) -> str:
    with pytest.raises(RanksFailed) as failure:
        resume(trained, tmp_path, *extra)
    text = str(failure.value)
    assert "ValueError" in text or "exit codes [2]" in text
    return text


def test_missing_checkpoint(tmp_path):
    argv = [
        *BASE,
        "--mock-data",
        "--train-iters",
        "1",
        "--lr-decay-iters",
        "10",
        "--load",
        str(tmp_path / "none"),
    ]
    with pytest.raises(RanksFailed, match=r"\[checkpoint-directory-missing\]"):
        train(tmp_path, argv)
    (tmp_path / "none").mkdir()
    done = train(tmp_path, argv)
    assert done.resumes == [] and f"{tmp_path}/none, " in " ".join(done.log.split())
    with pytest.raises(RanksFailed, match="--exit-on-missing-checkpoint"):
        train(tmp_path, [*argv, "--exit-on-missing-checkpoint"])


def test_a_finished_run_started_again(trained, tmp_path):
    """It says so, trains nothing, evaluates, and ends well."""
    resume(trained, tmp_path / "first")
    done = resume((tmp_path / "first", trained[1]), tmp_path / "again")
    (line,) = (line for line in done.log.splitlines() if line.startswith("nothing left to train: "))
    assert "iteration 8" in line and "--train-iters" in line
    assert not done.rows and [place for *place, _ in done.evaluations] == [["validation", 8]]


@pytest.mark.parametrize(
    "extra, says",
    [
        (["--seed", "7"], "seed: 1234 in"),
        (
            ["--train-iters", "60", "--override-opt_param-scheduler", "--exit-interval", "6"],
            "num_epochs",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                (["--split", "70,30,0"], "--split"),
                (["--seq-length", "16"], "sequence_length: 32 in"),
                (["--dataloader-type", "cyclic"], "dataloader_type"),
            )
        ),
        (
            ["--global-batch-size", "4", "--override-opt_param-scheduler"],
            "--global-batch-size was 8, is 4",
        ),
    ],
)
def test_another_data_order_is_refused_unless_asked_for(trained, tmp_path, extra, says):
    text = refused(trained, tmp_path / "refused", *extra)
    assert says in text and "--allow-data-order-change" in text
    run = resume(trained, tmp_path / "allowed", *extra, "--allow-data-order-change")
    assert run.rows[0]["iteration"] == 5
    if "--global-batch-size" in extra:
        # goes on after the samples already consumed
        assert run.rows[0]["consumed_samples"] == 4 * 8 + 4


@pytest.mark.parametrize(
    "extra, code, named",
    [
        (
            ["--vocab-size", "223", "--allow-data-order-change"],
            "checkpoint-of-another-tokenizer",
            "tokenizer",
        ),
        (["--ckpt-step", "3"], "checkpoint-step-missing", "2, 4"),
    ],
)
def test_another_model_is_refused(trained, tmp_path, extra, code, named):
    """Of the flags alone: tests/core/training/test_preflight.py."""
    said = refused(trained, tmp_path, *extra)
    assert f"[{code}]" in said and named in said


def test_every_other_difference_is_said(trained, tmp_path):
    log = resume(trained, tmp_path, "--clip-grad", "0.5", "--hidden-dropout", "0").log
    differ = [line.partition(": ")[2] for line in log.splitlines() if line.startswith(DIFFERS)]
    assert sorted(differ) == ["clip_grad was 1.0, is 0.5", "hidden_dropout was 0.1, is 0.0"]


def test_a_list_is_said_as_it_was_typed(capsys):
    flags = [*SMALL, "--mock-data", "--train-iters", "8"]
    skipping = [*flags, "--train-range-to-skip", "3", "4"]
    configs = [command_line.read(words, {}, tree=RunConfig).config for words in (skipping, flags)]
    check_architecture(*configs, strict=True)
    assert capsys.readouterr().out.endswith(": train_range_to_skip was 3 4, is None\n")


def test_ckpt_step_and_directory_of_one_checkpoint(trained, tmp_path):
    older = resume(trained, tmp_path / "a", "--ckpt-step", "2")
    assert older.rows[0]["iteration"] == 3
    folder, argv = trained
    places = ["--load", str(folder / "save/iter_0000002"), "--save", str(tmp_path / "b/save")]
    run = train(tmp_path / "b", [*argv, *places])
    assert run.series("lm_loss") == older.series("lm_loss")


def test_finetune_starts_anew_from_the_weights(trained, tmp_path):
    run = resume(
        trained,
        tmp_path,
        "--finetune",
        "--lr",
        "0.0001",
        "--train-iters",
        "1",
        "--split",
        "50,50,0",
    )
    assert [row["iteration"] for row in run.rows] == [1] and run.rows[0]["consumed_samples"] == 8
    state = reading.load(run.save).state
    assert state.optimizer["step"] == 1 and state.scheduler["num_steps"] == 8
    # data and schedule of a fine-tune are meant to differ: not said
    assert DIFFERS not in run.first_rank_log


def test_without_an_interval_the_end_is_saved(tmp_path):
    argv = [
        *with_flags(SMALL, "--train-iters", "4"),
        "--mock-data",
        "--save",
        str(tmp_path / "save"),
    ]
    train(tmp_path, argv)
    assert reading.load(tmp_path / "save").state.iteration == 4


def test_no_load_optim_keeps_counters_and_drops_optimizer_and_schedule(trained, tmp_path):
    run = resume(trained, tmp_path, "--no-load-optim", "--exit-interval", "5")
    assert [row["iteration"] for row in run.rows] == [5]
    state = reading.load(run.save).state
    assert (
        state.optimizer["step"] == 1
        and state.scheduler["num_steps"] == 8
        and state.consumed_train_samples == 40
    )


def test_no_save_optim(trained, tmp_path):
    run = resume(trained, tmp_path / "a", "--no-save-optim", "--exit-interval", "5")
    assert not [name for name in run.tensors() if name.startswith("optimizer.")]
    folder, argv = trained
    again = [*argv, "--load", str(run.save), "--save", str(tmp_path / "b/save")]
    with pytest.raises(RanksFailed, match=r"\[checkpoint-without-optimizer\]"):
        train(tmp_path / "b", again)
    assert train(tmp_path / "b", [*again, "--no-load-optim"]).rows[0]["iteration"] == 6


def test_precision_may_change(trained, tmp_path):
    """bf16 goes on from fp32's weights, and back: main weights are what counts."""
    low = resume(trained, tmp_path / "low", "--bf16", "--exit-interval", "5")
    assert "optimizer.fp32_param.decoder.final_layernorm.weight" in low.tensors()
    folder, argv = trained
    back = train(
        tmp_path / "back", [*argv, "--load", str(low.save), "--save", str(tmp_path / "back/save")]
    )
    assert [row["iteration"] for row in back.rows] == [6, 7, 8]


def test_replay_from_the_args_file(trained, tmp_path):
    """`@iter_XXXXXXX/args` is the run's command line; without --load it may not meet its own
    checkpoints."""
    folder, argv = trained
    again = train(
        tmp_path, [f"@{folder / 'save/iter_0000004/args'}", "--save", str(tmp_path / "save")]
    )
    same_tensors(again.tensors(4), store_tensors(folder / "save", 4))
    with pytest.raises(RanksFailed) as refused:
        train(folder, argv)
    assert "exit codes [2]" in str(refused.value)


def store_tensors(path, step):
    with reading.load(path, step).reader() as reader:
        return {name: reader.read(name) for name in reader.names()}
