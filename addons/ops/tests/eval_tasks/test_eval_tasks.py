"""--eval-tasks: scores in the training loop are those of run_lm_eval.py on the checkpoint, in every
layout that has them, and training's losses are the same with and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkrun import ROOT, RanksFailed
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_reported
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
WORDS = ("sea", "tree", "stone", "bird", "king", "night", "song")
DOCUMENTS = {
    "choices": [
        {"question": f"the {word} is", "choices": [" old", " xq", " here"], "answer": n % 3}
        for n, word in enumerate(WORDS)
    ],
    "texts": [
        {"text": f"the {word} is here and the {word} is old. " * n}
        for n, word in enumerate(WORDS[:3], 1)
    ],
}
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "brier_score"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}
FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT, "--mock-data"],
    *"--tokenizer-type ByteTokenizer --vocab-size 257 --seq-length 64 --max-position-embeddings 64".split(),
    *"--train-iters 4 --eval-iters 0 --lr 0.01 --save-interval 4 --global-batch-size 4".split(),
    # scores drop no token, whatever the batch
    *"--num-experts 4 --moe-expert-capacity-factor 0.5 --disable-bias-linear --init-method-std 0.2".split(),
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder with a YAML file of each task."""
    pytest.importorskip("lm_eval")
    path = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        data = path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS[name]))
        files = {"data_files": {"test": str(data)}, "cache_dir": str(path / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, **task}
        (path / f"{name}.yaml").write_text(json.dumps({**task, "test_split": "test"}))
    return path


def trained(folder: Path, *flags: str, world: int = 1) -> tuple[list[dict], list[dict]]:
    """(rows of iterations without times, rows of scores) of a run."""
    words = [*FLAGS, *flags, "--save", str(folder / "save")]
    train(folder / "log", words, world)
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    scores = [row for row in rows if row.get("split") == "tasks"]
    kept = ("iteration", "lm_loss", "grad_norm")
    return [{key: row[key] for key in kept} for row in rows if "lm_loss" in row], scores


@pytest.fixture(scope="module")
def with_scores(tasks, tmp_path_factory) -> tuple[Path, list[dict], list[dict]]:
    folder = tmp_path_factory.mktemp("scored")
    files = [str(tasks / f"{name}.yaml") for name in TASKS]
    flags = ["--eval-tasks", *files, "--eval-tasks-interval", "2"]
    return folder, *trained(folder, *flags)


def test_training_is_the_same_with_and_without(with_scores, tmp_path):
    _, losses, scores = with_scores
    without, none = trained(tmp_path)
    assert without == losses and len(losses) == 4
    assert [row["iteration"] for row in scores] == [2, 4] and not none


def test_the_scores_are_those_of_the_checkpoint(with_scores, tasks, tmp_path):
    folder, _, scores = with_scores
    words = [sys.executable, ROOT / "tools" / "run_lm_eval.py", folder / "save", "--"]
    words += ["--tasks", ",".join(TASKS), "--include_path", tasks, "--batch_size", "3"]
    words += ["--output_path", tmp_path / "out"]  # and no --device
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(file.read_text())["results"]
    expected = {
        f"{task}/{metric.removesuffix(',none')}": value
        for task, values in found.items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    assert {"choices/acc", "texts/bits_per_byte", "texts/word_perplexity"} <= expected.keys()
    got = {name: value for name, value in scores[-1].items() if "/" in name}
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ],
    ids=["dp2", "tp2dp2"],
)
def test_ranks_share_the_requests(with_scores, tasks, tmp_path, world, flags):
    """More ranks than documents of a task are no problem: three texts on two ranks."""
    _, losses, scores = with_scores
    files = [str(tasks / f"{name}.yaml") for name in TASKS]
    words = [*flags.split(), "--eval-tasks", *files, "--eval-tasks-interval", "2"]
    found, shared = trained(tmp_path, *words, world=world)
    assert [row["lm_loss"] for row in found] == pytest.approx([row["lm_loss"] for row in losses])
    assert len(shared) == len(scores) == 2
    for one, other in zip(shared, scores, strict=True):
        del one["split"]
        assert one == pytest.approx({name: other[name] for name in one}, rel=1e-4)


@pytest.mark.parametrize(
    "content",
    ["task: [", "{}", json.dumps({"task": "x", "output_type": "generate_until"})],
    ids=["no-yaml", "no-task", "generates"],
)
def test_a_file_that_is_no_such_task(tasks, tmp_path, content):
    bad = tmp_path / "bad.yaml"
    bad.write_text(content)
    words = [*FLAGS, "--eval-tasks", str(bad), "--eval-tasks-interval", "2"]
    with pytest.raises(RanksFailed) as refused:
        train(tmp_path / "log", words)
    assert_reported(str(refused.value), "eval-task-unreadable", "--eval-tasks", bad)


def without_lm_eval() -> None:
    sys.modules["lm_eval"] = None


def test_without_lm_eval_there_is_one_error(tmp_path):
    (tmp_path / "task.yaml").write_text("task: x")
    words = [*FLAGS, "--eval-tasks-interval", "2", "--eval-tasks", str(tmp_path / "task.yaml")]
    with pytest.raises(RanksFailed) as refused:
        train(tmp_path / "log", words, hook=without_lm_eval)
    named = ("--eval-tasks", "pip install lm-eval")
    assert_reported(str(refused.value), "package-missing", *named)


def test_lm_eval_gets_the_dtype(capfd):
    tool = load_tool("run_lm_eval")
    given = tool.Options(checkpoint="run", dtype="bf16", arguments=("--tasks", "a")).words()
    assert given[given.index("--model_args") + 1] == "checkpoint=run,dtype=bf16"
    problems = tool.Options(dtype="bf16", arguments=("--tasks", "a")).problems()
    assert [text.rpartition("[")[2] for text in problems] == ["flag-needs-other-flag]"]
    for name in ("evaluate", "run_lm_eval"):
        assert exit_code(load_tool(name).main, "run", "--dtype", "bf17") == 2
        assert "value-not-a-choice" in capfd.readouterr().err
