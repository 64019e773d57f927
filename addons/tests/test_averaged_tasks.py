"""Scores of tasks while training, of averaged weights: those of the checkpoints that the tool writes of
them; what is trained and its own scores stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.load_tool import load_tool
from tests.runs import NO_DROPOUT, SMALL, same_tensors, train, with_flags

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
WORDS = ("sea", "tree", "stone", "bird", "king")
FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT, "--mock-data"],
    *"--tokenizer-type ByteTokenizer --vocab-size 257 --seq-length 64 --max-position-embeddings 64".split(),
    *"--train-iters 4 --eval-iters 0 --lr 0.05 --save-interval 1 --global-batch-size 4".split(),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    rows = [{"text": f"the {word} is here and the {word} is old. "} for word in WORDS]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "texts.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "texts.yaml").write_text(json.dumps(content))
    return folder / "texts.yaml"


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, ""), (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")],
    ids=["one rank", "ZeRO-1"],
)
def test_scores_of_averages_are_those_of_their_checkpoints(tmp_path, task, world, layout):
    pytest.importorskip("lm_eval")
    from megatron.addons.ops.lm_eval_model import MegatronGPT, read_tasks, task_scores

    def trained(name: str, *flags: str):
        words = [*FLAGS, *layout.split(), *flags, "--save", str(tmp_path / name / "save")]
        words += ["--eval-tasks", str(task), "--eval-tasks-interval", "2"]
        done = train(tmp_path / name, words, world)
        return done, [row for row in done._written() if row.get("split") == "tasks"]

    plain, alone = trained("plain")
    done, scores = trained("averaged", "--ema-decay", "0.5", "--merge-window", "3")
    assert done.series("lm_loss") == plain.series("lm_loss")
    kept = {name: done.tensors()[name] for name in plain.tensors()}
    same_tensors(kept, plain.tensors())
    for row, other in zip(scores, alone, strict=True):
        assert {name: row[name] for name in other} == other
    # after the save of iteration 2 there are two checkpoints, of 4 there are four
    assert [set(row) & {"texts-merged/bits_per_byte"} for row in scores] == [
        set(),
        {"texts-merged/bits_per_byte"},
    ]
    merge = load_tool("merge_checkpoints")
    save = tmp_path / "averaged/save"
    three = [str(save / f"iter_{n:07d}") for n in (2, 3, 4)]
    assert merge.main([*three, "--save", str(tmp_path / "merged")]) == 0
    assert merge.main([str(save), "--ema", "--save", str(tmp_path / "ema")]) == 0
    values = []
    for name, suffix in (("averaged/save", ""), ("merged", "-merged"), ("ema", "-ema")):
        model = MegatronGPT(str(tmp_path / name), batch_size=3, device="cpu")
        found = task_scores(model, read_tasks(str(task)))["texts/bits_per_byte"]
        assert scores[-1][f"texts{suffix}/bits_per_byte"] == pytest.approx(found, rel=1e-5)
        values.append(found)
    assert min(abs(a - b) for a, b in zip(values, values[1:], strict=False)) > 1e-3
