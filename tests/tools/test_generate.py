"""tools/generate.py on a checkpoint of a short run: which one it takes, what it prints, and how it
says no."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.inference.generate import load_model
from megatron.inference.load_model import open_trained_model
from tests.core.data.vocabularies import write_sentencepiece, write_tiktoken
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem, numbers, raises
from tests.runs import train, with_flags

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "generate.py"
TRAIN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --train-iters 4 --lr 1e-2 --save-interval "
    "2 --eval-iters 0 --mock-data --vocab-size 50 --device cpu --num-workers 0"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory with the iterations 2 and 4 of a model of numbers below 50."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "log", [*TRAIN, "--save", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return load_tool("generate")


@pytest.fixture
def talk(tool, capfd):
    """Call the tool as its command line would; returns (exit code, stdout, stderr)."""

    def call(*words: object) -> tuple[int, str, str]:
        code = exit_code(tool.main, *words)
        return code, *capfd.readouterr()

    return call


def test_it_continues_the_prompt_with_the_newest_checkpoint_from_any_folder(
    run, tmp_path, warm_python
):
    command = [
        warm_python,
        str(TOOL),
        str(run),
        "1 2 3",
        "--max-new-tokens",
        "5",
        "--temperature",
        "0",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert (
        words[:3] == ["1", "2", "3"]
        and 4 <= len(words) <= 8
        and all(int(word) < 50 for word in words)
    )
    assert "iter_0000004 (iteration 4)" in done.stderr


def test_an_iteration_can_be_named_in_two_ways(run, talk):
    code, text, said = talk(run / "iter_0000002", "7", "--max-new-tokens", 3, "--seed", 5)
    assert code == 0 and "(iteration 2)" in said
    assert text == talk(run, "7", "--max-new-tokens", 3, "--seed", 5, "--ckpt-step", 2)[1]
    assert text != talk(run / "iter_0000002", "7", "--max-new-tokens", 3, "--seed", 6)[1]


def test_a_model_without_heads_drafts_nothing(run, talk):
    code, text, errors = talk(run, "1", "--num-speculative-tokens", 1)
    assert code == 1 and text == ""
    assert_problem(errors.splitlines()[-1], "speculative-unfit", "--num-speculative-tokens 1")


@pytest.mark.campaign
def test_drafts_change_no_text_and_their_acceptance_is_said(tmp_path, talk):
    more = f"--mtp-num-layers 2 --position-embedding-type rope --save {tmp_path / 'run'}"
    train(tmp_path / "log", [*TRAIN, *more.split()])
    words = [tmp_path / "run", "1 2 3", "7", "--max-new-tokens", 12, "--json", "--seed", 3]
    code, text, said = talk(*words)
    assert code == 0 and "depth" not in said
    code, drafted, said = talk(*words, "--num-speculative-tokens", 2)
    assert (code, drafted) == (0, text)
    shares = numbers(said.splitlines()[-1])
    assert len(shares) == 4 and 0 <= shares[2] <= shares[0] <= 1 <= shares[1]


def test_without_a_prompt_it_starts_a_document(run, talk):
    code, text, said = talk(run, "--max-new-tokens", 4)
    assert code == 0 and text.strip(), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "1", "--ckpt-step", "3"], "complete here: 2, 4"),
        (["run", "one"], "'one'"),
        (["run", "50"], "'50'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run, talk, monkeypatch, words, said):
    monkeypatch.chdir(run.parent)
    code, text, errors = talk(*words)
    assert (
        code == 1
        and text == ""
        and said in errors
        and errors.splitlines()[-1].startswith("error: ")
    )


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], ["CHECKPOINT: missing: "]),
        (["empty"], ["CHECKPOINT: empty: "]),
        (["exported"], ["[checkpoint-of-another-suite]"]),
        (
            ["run", "1", "--temperature", "-1", "--top-p", "0"],
            ["--temperature -1.0: must be", "--top-p 0.0: must be"],
        ),
        (["run", "1", "--max-new-tokens", "0"], ["--max-new-tokens 0: "]),
        (["run", "1", "--vocab-file", "none.json"], ["--vocab-file none.json: "]),
        ([], ["[flag-missing]"]),
    ],
)
def test_a_wrong_command_line_is_refused_before_torch_is_loaded(run, words, said):
    for name in ("empty", "exported"):
        (run.parent / name).mkdir(exist_ok=True)
    (run.parent / "exported" / "config.json").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(TOOL), *words],
        cwd=run.parent,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith("error: ") and text in line


def test_the_vocabulary_is_that_of_the_training_flags(tmp_path, talk):
    """Settings of a tokenizer travel with the checkpoint; its file may lie elsewhere now."""
    pytest.importorskip("tiktoken")
    path = write_tiktoken(tmp_path / "v.json", [b"aB"])
    flags = [word if word != "50" else "265" for word in TRAIN] + [
        "--tokenizer-type",
        "TikTokenizer",
    ]
    flags += [
        "--tokenizer-model",
        path,
        "--tiktoken-num-special-tokens",
        "8",
        "--tiktoken-pattern",
        "v1",
    ]
    train(tmp_path / "log", [*flags, "--save", str(tmp_path / "run")])
    there = shutil.move(path, tmp_path / "moved.json")
    code, text, errors = talk(
        tmp_path / "run", "aBa", "--tokenizer-model", there, "--max-new-tokens", 2
    )
    assert code == 0 and text.startswith("aBa"), errors
    trained = open_trained_model(
        str(tmp_path / "run"), None, {"tokenizer_model": str(there)}, "cpu"
    )
    assert trained.tokenizer.tokenize("aBa") == [264, ord("a") + 8]


def test_a_model_of_ids_speaks_with_the_tokenizer_of_its_data(tmp_path, talk):
    """As from a config of InternLM, which names no tokenizer; the vocabulary may be larger."""
    model = write_sentencepiece(tmp_path)
    flags = with_flags(TRAIN, "--vocab-size", "320", "--swiglu", "--disable-bias-linear")
    flags += "--normalization RMSNorm --position-embedding-type rope".split()
    flags += ["--untie-embeddings-and-output-weights", "--ffn-hidden-size", "64"]
    run = tmp_path / "run"
    train(tmp_path / "log", [*flags, "--save", str(run)])
    named = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", model]
    code, text, errors = talk(run, "the quick fox", *named, "--max-new-tokens", 3)
    assert code == 0 and text.startswith("the quick fox"), errors
    for words in (named[2:], ["--tokenizer-type", "GPT2BPETokenizer", *named[2:]]):
        code, _, errors = talk(run, "the", *words)
        assert code == 1
        assert_problem(errors.strip(), "tokenizer-not-that-of-training", "--tokenizer-model")
    small = tmp_path / "small"
    train(tmp_path / "log2", [*with_flags(flags, "--vocab-size", "50"), "--save", str(small)])
    code, _, errors = talk(small, "the", *named)
    assert code == 1 and "[tokenizer-not-that-of-training]" in errors
    convert = load_tool("convert_checkpoint")
    more = ["--family", "llama", "--unverified"]
    assert exit_code(convert.main, "hf-export", run, tmp_path / "hf", *named, *more) == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos")] == [1, 2]
    assert config["vocab_size"] == 320 and (tmp_path / "hf/tokenizer.model").is_file()


def test_a_changed_args_file_is_noticed(run, talk, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    args = tmp_path / "run" / "iter_0000004" / "args"
    args.write_text(args.read_text().replace("--vocab-size 50", "--vocab-size 51"))
    code, _, errors = talk(tmp_path / "run", "1")
    assert code == 1 and str(args) in errors


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_several_prompts_get_together_what_they_get_alone(run, talk, tmp_path):
    prompts = ["1 2 3", "7", "4 5 6 7 8 9", "2 2"]
    flags = ["--max-new-tokens", 6, "--json", "--logprobs", 2]
    code, text, errors = talk(run, *prompts, *flags, "--batch-size", 3)
    assert code == 0, errors
    together = answers(text)
    assert [each["prompt"] for each in together] == prompts
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = answers(talk(run, prompt, *flags)[1])
        assert found["text"] == alone["text"] and found["finish_reason"] in ("stop", "length")
        assert [token["id"] for token in found["tokens"]] == [int(w) for w in found["text"].split()]
        for token in found["tokens"]:
            assert token["logprob"] < 0 and len(token["top_logprobs"]) == 2
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (tmp_path / "p.txt").write_text("".join(p + "\n" for p in prompts))
    for name in ("p.jsonl", "p.txt"):
        found = answers(talk(run, "--prompt-file", tmp_path / name, *flags)[1])
        assert [each["text"] for each in found] == [each["text"] for each in together]
    plain = talk(run, *prompts, "--max-new-tokens", 6)[1]
    assert all(
        prompt + found["text"] in plain for prompt, found in zip(prompts, together, strict=True)
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1", "--prompt-file", "none.txt"], "--prompt-file none.txt: "),
        (["1", "--logprobs", "3"], "--logprobs 3: must be"),
        (["1", "--batch-size", "0"], "--batch-size 0: must be"),
    ],
)
def test_options_that_do_not_go_together(run, talk, words, said):
    code, _, errors = talk(run, *words)
    assert code == 2 and said in errors


def test_a_file_of_prompts_that_is_not_utf8(run, talk, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"1\xff\n")
    code, _, errors = talk(run, "--prompt-file", tmp_path / "p.txt")
    assert code == 1
    assert_problem(errors.splitlines()[-1], "bad-record", "--prompt-file", "byte 1")


def test_generate_of_python_is_that_of_the_tool(run, talk):
    model = load_model(run, device="cpu")
    flags = ["--max-new-tokens", 6, "--seed", 5, "--top-k", 9, "--json"]
    prompts = ["1 2 3", "7", "4 5 6 7 8 9"]
    options = {"max_new_tokens": 6, "seed": 5, "top_k": 9}
    texts = model.generate(prompts, **options, batch_size=2)
    assert texts == [each["text"] for each in answers(talk(run, *prompts, *flags)[1])]
    assert model.generate(prompts[0], **options) == texts[0]
    word = texts[0].split()[3]
    assert model.generate(prompts[0], **options, stop=f" {word}") == texts[0].split(f" {word}")[0]
    with pytest.raises(ValueError, match=r"(?s)temperature.*top-p.*max_new_tokens 0"):
        model.generate("1", 0, temperature=-1, top_p=0)
    with raises(ValueError, "checkpoint-directory-missing", "missing"):
        load_model("missing")


@pytest.mark.campaign
def test_the_processes_of_torchrun_share_the_model(run, warm_python):
    """Two of them print the text that one prints, from a checkpoint of one process."""
    words = [str(TOOL), str(run), "1 2 3", "7", "--json", "--max-new-tokens", "6"]
    words += ["--device", "cpu", "--temperature", "0"]
    launch = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    texts = []
    for command in ([warm_python], [*launch, "2"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append([each["text"] for each in answers(done.stdout)])
    assert texts[0] == texts[1] and len(texts[0]) == 2
    three = subprocess.run([*launch, "3", *words], capture_output=True, text=True, timeout=120)
    assert three.returncode != 0 and "heads (2) " in three.stderr
