"""lm-eval on a checkpoint of ours against `--model hf` on its export: the same scores of three local
tasks, and evaluate.py against transformers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forkrun import ROOT
from tests.load_tool import exit_code, load_tool
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
LINES = [
    f"the {animal} {verb} the {other}; " * 3
    for animal in ("cat", "dog", "bird", "horse")
    for verb in ("sees", "likes", "follows")
    for other in ("tree", "house", "river")
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": [";"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS = {
    "choices": [
        {
            "question": f"the {who} sees",
            "choices": [" the tree", " tree the", " x"],
            "answer": n % 3,
        }
        for n, who in enumerate(("cat", "dog", "bird", "horse", "a very long " * 12 + "cat"))
    ],
    "texts": [{"text": " ".join(LINES[at : at + 4])} for at in range(0, 12, 4)] + [{"text": "cat"}],
    "answers": [
        {"question": f"the {who} {does}", "target": " the tree"}
        for who in ("cat", "dog", "bird")
        for does in ("sees", "likes", "follows the house; the horse")
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model trained on a little text by two tensor-parallel ranks (run), its export (hf) with the
    tokenizer.json that hf-export makes of GPT-2's two files, and the tasks."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("lm_eval")
    lines = "".join(json.dumps({"text": line}) + "\n" for line in LINES * 4)
    (path / "text.jsonl").write_text(lines)
    words = ["--input", path / "text.jsonl", "--vocab-size", 320]
    assert exit_code(load_tool("train_tokenizer").main, *words, "--output-dir", path / "bpe") == 0
    files = f"--vocab-file {path / 'bpe/vocab.json'} --merge-file {path / 'bpe/merges.txt'}"
    tokenizer = f"--tokenizer-type GPT2BPETokenizer {files}".split()
    words = ["--input", path / "text.jsonl", "--output-prefix", path / "x", *tokenizer]
    assert exit_code(load_tool("preprocess_data").main, *words, "--append-eod") == 0
    at = SMALL.index("--tokenizer-type")
    flags = with_flags([*SMALL[:at], *SMALL[at + 4 :], *NO_DROPOUT, *tokenizer], "--lr", "0.02")
    flags += f"--data-path {path / 'x_text_document'} --split 100,0,0 --eval-iters 0".split()
    flags += f"--train-iters 150 --save {path / 'run'} --save-interval 150 --swiglu".split()
    flags += "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear".split()
    train(path / "log", [*flags, "--tensor-model-parallel-size", "2"], 2)
    convert = load_tool("convert_checkpoint").main
    assert exit_code(convert, "hf-export", path / "run", path / "hf") == 0
    (path / "tasks").mkdir()
    for name, task in TASKS.items():
        data = path / "tasks" / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS[name]))
        config = {
            "task": f"our_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(path / "cache")},
            "test_split": "test",
            "num_fewshot": 0,
            **task,
        }
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return path


def evaluated(folder: Path, name: str, **given: object) -> tuple[dict, dict]:
    """(scores, answers by task) of a model that lm-eval knows."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=name,
        model_args=given,
        tasks=[f"our_{task}" for task in TASKS],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=3,
        bootstrap_iters=0,
        log_samples=True,
    )
    scores = {
        (task, metric): value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    answers = {
        task: [one["filtered_resps"] for one in sorted(samples, key=lambda one: one["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return scores, answers


def numbers(value: object) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def test_the_scores_are_those_of_the_export(folder):
    import megatron.addons.ops.lm_eval_model  # noqa: F401 (registers the model)

    theirs, their_answers = evaluated(
        folder, "hf", pretrained=str(folder / "hf"), dtype="float32", max_length=32
    )
    ours, answers = evaluated(folder, "megatron_gpt", checkpoint=str(folder / "run"))
    assert ours.keys() == theirs.keys() and len(ours) == 6
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-4), key
    assert answers["our_answers"] == their_answers["our_answers"]
    assert len({answer for (answer,) in answers["our_answers"]}) > 1
    for task in ("our_choices", "our_texts"):
        found = numbers(answers[task])
        assert found == pytest.approx(numbers(their_answers[task]), rel=1e-4, abs=1e-4)


@pytest.mark.sweep  # docs/evaluation.md runs it, too
def test_the_command(folder, tmp_path):
    words = [sys.executable, str(ROOT / "tools" / "run_lm_eval.py"), str(folder / "run"), "--"]
    words += f"--tasks our_answers --include_path {folder / 'tasks'} --device cpu".split()
    words += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "our_answers" in done.stdout and list((tmp_path / "out").rglob("results*.json"))


def test_perplexity_is_that_of_transformers(folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    text = "\n".join(LINES[:6])
    (tmp_path / "a.txt").write_text(text)
    words = [folder / "run", tmp_path / "a.txt", "--stride", 8, "--json", "--device", "cpu"]
    assert exit_code(load_tool("evaluate").main, *words) == 0
    found = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    nats = 0.0
    done = 0
    while done < len(ids) - 1:
        end = min(done + (8 if done else 32), len(ids) - 1)
        first = max(0, end - 32)
        with torch.no_grad():
            logits = model(torch.tensor([ids[first:end]])).logits[0].double()
        logs = torch.log_softmax(logits, -1)
        nats -= sum(float(logs[at - 1 - first, ids[at]]) for at in range(done + 1, end + 1))
        done = end
    assert found["tokens"] == len(ids) - 1 and found["text_bytes"] == len(text.encode())
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
