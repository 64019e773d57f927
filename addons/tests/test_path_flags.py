"""Every flag that takes a text, most of which are paths, with names that are odd: the run takes it,
or one error with the flag's name comes at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.arguments import Flag, flags_of
from megatron.checkpoint import reading
from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests.problems import code_of, codes_of
from tests.runs import SMALL, train, with_flags, write_text

ODD = {
    "not UTF-8": os.fsdecode(b"bad\xff"),
    "blanks": " a  b ",
    "quotes": "a'b\"c`d$e",
    "newline": "a\nb",
    "tab": "a\tb",
    "300 characters": "n" * 300,
    "300 bytes": "\u4e2d" * 100,
    "5000 characters": "n/" * 2500,
    "dash": "-a",
    "at": "@a",
    "tilde": "~a",
    "glob": "a[b]*?",
    "percent": "%n%d{}",
}
LINE = with_flags(SMALL, "--lr-warmup-iters", "0", "--train-iters", "1", "--mock-data")
FIM = "--fim-data --data-path x --dry-run"
SAVES = "--save runs --save-interval 1 "
# what gives a flag its effect, if it has none alone
WITH = {
    "--pipeline-model-parallel-layout": "--pipeline-model-parallel-size 1",
    "--no-rope-freq": "--position-embedding-type rope",
    "--moe-layer-freq": "--num-experts 2",
    "--vocab-file": "--tokenizer-type GPT2BPETokenizer --merge-file m",
    "--merge-file": "--tokenizer-type GPT2BPETokenizer --vocab-file v",
    "--tokenizer-model": "--tokenizer-type HuggingFaceTokenizer",
    "--tiktoken-special-tokens": "--tokenizer-type TikTokenizer --tokenizer-model m",
    "--data-cache-path": "",
    "--object-storage-cache-path": "--data-path s3://bucket/x",
    "--save": "--save-interval 1",
    "--staging-dir": "--save s3://bucket/x --save-interval 1",
    "--snapshot-dir": f"{SAVES} --snapshot-interval 1",
    "--non-persistent-local-ckpt-dir": (
        f"{SAVES} --snapshot-interval 1 --non-persistent-ckpt-type local"
    ),
    "--fim-split-sample": f"{FIM} --fim-fragment-rate 1",
    **dict.fromkeys(
        ("--fim-no-prefix", "--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token")
        + ("--fim-pad-token", "--fim-eod-token"),
        FIM,
    ),
    "--eval-tasks": "--eval-tasks-interval 1",
    "--export-kd-cfg": "--export-kd-teacher-load t",
    "--trace-ranks": "--trace --dry-run",
    "--trace-output": "--trace --dry-run",
    "--wandb-exp-name": "--wandb-project x",
    "--wandb-entity": "--wandb-project x",
    "--wandb-save-dir": "--wandb-project x",
}
TEXTS = {
    flag.spelling: flag
    for flag in flags_of(RunConfig).values()
    if flag.kind in ("value", "list") and flag.type is str and not flag.choices
}
WRITTEN = {
    "--control-file",
    "--data-cache-path",
    "--data-ledger",
    "--metrics-file",
    "--non-persistent-local-ckpt-dir",
    "--object-storage-cache-path",
    "--save",
    "--snapshot-dir",
    "--staging-dir",
    "--tensorboard-dir",
    "--wandb-save-dir",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def refusal(flag: Flag, value: str, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What the command line of a real run is refused with; None if it is taken."""
    line = [*LINE, *WITH.get(flag.spelling, "").split()]
    if flag.spelling.endswith(("data-path", "data-args-path")) or "--data-path" in line:
        line.remove("--mock-data")  # two sources
    try:
        read = command_line.read([*line, f"{flag.spelling}={value}"], {}, tree=RunConfig)
    except SystemExit as end:
        assert end.code == 2
        return capsys.readouterr().err
    taken = getattr(getattr(read.config, flag.group), flag.name)
    assert value in (taken if flag.kind == "list" else (taken,)), "it has no effect: see WITH"
    return None


QUICK = ("not UTF-8", "blanks", "5000 characters", "percent")  # the others are campaigns


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.campaign] * (kind not in QUICK)) for kind in ODD]
)
def test_an_odd_text_is_taken_or_refused_by_name(kind, here, capsys):
    taken = []
    for spelling, flag in TEXTS.items():
        said = refusal(flag, ODD[kind], capsys)
        if said is None:
            taken.append(spelling)
            continue
        # a value may have a line end
        errors = ["error: " + text for text in said.rstrip("\n").split("error: ")[1:]]
        assert errors and all(code_of(error.rstrip("\n")) for error in errors)
        assert any(spelling in error for error in errors), said
        assert kind != "not UTF-8" or "value-not-utf8" in codes_of(said.splitlines())
    assert not list(here.iterdir())
    assert kind != "not UTF-8" or not taken
    long = kind in ("not UTF-8", "300 characters", "300 bytes", "5000 characters")
    assert set(taken) >= WRITTEN if not long else not WRITTEN & set(taken)


@pytest.mark.campaign
def test_a_run_in_directories_with_odd_names(here):
    def named(letter: str) -> str:
        return f"a 'b\"c`$d\n[e]*?%n{{}}~@\u4e2d{letter}"

    Path(named("d")).mkdir()
    write_text(Path(named("d")) / named("c"), 400)
    line = with_flags(SMALL, "--lr-warmup-iters", "0", "--train-iters", "2", "--split", "98,1,1")
    line += ["--data-path", f"{named('d')}/{named('c')}", "--load", named("s")]
    line += "--save-interval 1 --snapshot-interval 1 --lr-decay-iters 9".split()
    files = {
        "--data-cache-path": "k",
        "--save": "s",
        "--snapshot-dir": "n",
        "--control-file": "f",
        "--tensorboard-dir": "t",
        "--data-ledger": "l",
    }
    line += [word for flag, letter in files.items() for word in (flag, named(letter))]
    train(here / "log", line)
    run = train(here / "log", with_flags(line, "--train-iters", "4"))
    assert run.resumes == [2] and reading.latest(named("s")) == 4
    assert {named(letter) for letter in files.values()} - {named("n")} <= set(os.listdir())
