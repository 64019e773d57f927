"""tools/convert_checkpoint.py extend-vocabulary: old texts keep their logits, new rows are what the
formula says of the old ones, transformers loads the export, old data are taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.addons.convert.added_tokens import AddedTokens
from megatron.addons.convert.vocabulary import new_rows
from megatron.checkpoint import reading
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.bpe import HuggingFaceTokenizer
from megatron.data.tokenizers.metadata import check, description
from megatron.inference.load_model import open_trained_model
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.build import build_run
from megatron.training.checkpointing.load import load_newest
from megatron.training.launch.initialize import Runtime
from tests.core.training.built_runs import config_of
from tests.forkrun import run_ranks
from tests.problems import codes_of, raises
from tests.runs import same_tensors

OLD = 300  # tokens; the run directory has padding rows behind them
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --norm-epsilon 1e-6 "
    "--max-position-embeddings 64 --seq-length 64"
).split()


def write_model(folder: Path, tokens: int = OLD, rows: int = OLD, **sizes) -> None:
    """A Llama with random weights and a byte-level BPE tokenizer, as transformers writes them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).read_text() + "".join(f" w{n}" for n in range(tokens))
    engine.train_from_iterator([text], trainer)
    assert engine.get_vocab_size() == tokens
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|end|>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=rows, max_position_embeddings=64, tie_word_embeddings=False, **(SIZES | sizes)
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def add_tokens(source: Path, target: Path, count: int) -> None:
    """The tokenizer with more tokens, of which two texts have characters of no old token's."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<|new {n}|>" for n in range(count)], special_tokens=True)
    tokenizer.save_pretrained(target)


def logits_of_ranks(rank: int, world: int, load: str, ids: torch.Tensor) -> torch.Tensor:
    """The logits [b, s, vocabulary] of a checkpoint under tensor parallelism."""
    parallel = ("--tensor-model-parallel-size", str(world))
    tokenizer = HuggingFaceTokenizer(f"{load}/huggingface")
    kind = ("--tokenizer-type", "HuggingFaceTokenizer")
    path = ("--tokenizer-model", f"{load}/huggingface", "--load", load, "--finetune")
    config = config_of(*FLAGS, *parallel, *kind, *path, "--make-vocab-size-divisible-by", "16")
    ctx = ParallelContext(config.parallel, world, rank)
    plan = make_plan(config, world, tokenizer.vocab_size)
    runtime = Runtime(torch.device("cpu"), ctx, world, rank)
    run = build_run(config, plan, runtime, Timers(), tokenizer)
    load_newest(run, config.checkpoint)
    with torch.no_grad():
        return run.model[0](ids)


@pytest.mark.peers
def test_old_texts_keep_their_logits_and_transformers_loads_the_export(tmp_path, convert):
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "hf")
    add_tokens(tmp_path / "hf", tmp_path / "longer", 10)
    convert("hf-import", tmp_path / "hf", tmp_path / "run", "--unverified")
    said = convert(
        "extend-vocabulary",
        *(tmp_path / "run", tmp_path / "long", "--tokenizer-model", tmp_path / "longer"),
    )
    assert "310 tokens, 10 of them new; 10 begin" in " ".join(said.split())
    ids = torch.randint(0, OLD, (2, 24), generator=torch.Generator().manual_seed(1))
    before = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        wanted = before(ids).logits
        old = open_trained_model(str(tmp_path / "run"), device="cpu").model(ids)
        new = open_trained_model(str(tmp_path / "long"), device="cpu").model(ids)
    assert new.shape[-1] == OLD + 10 and torch.equal(new[..., :OLD], old[..., :OLD])
    torch.testing.assert_close(new[..., :OLD], wanted, rtol=0, atol=1e-5)
    for world in (2, 4):
        for of_rank in run_ranks(world, logits_of_ranks, str(tmp_path / "long"), ids):
            torch.testing.assert_close(of_rank[..., : OLD + 10], new, rtol=0, atol=1e-5)

    convert("hf-export", tmp_path / "long", tmp_path / "out", "--unverified")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.vocab_size == OLD + 10 and type(exported) is type(before)
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, new, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<|new 3|>") == [OLD + 3]


@pytest.mark.peers
def test_new_rows_are_the_mean_of_what_spells_them(tmp_path, convert):
    """Rows behind the tokenizer's are padding: no old tokens, and replaced by new ones."""
    tokenizers = pytest.importorskip("tokenizers")
    write_model(tmp_path / "hf", rows=OLD + 20)
    add_tokens(tmp_path / "hf", tmp_path / "longer", 7)
    convert("hf-import", tmp_path / "hf", tmp_path / "run", "--unverified")
    with reading.load(tmp_path / "run").reader() as reader:
        old = {name: reader.read(name) for name in (EMBEDDING, HEAD)}
    assert len(old[HEAD]) == OLD + 20
    spelled = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    for way in ("pieces", "mean"):
        words = ("--tokenizer-model", tmp_path / "longer", "--new-rows", way)
        convert("extend-vocabulary", tmp_path / "run", tmp_path / way, *words)
        with reading.load(tmp_path / way).reader() as reader:
            for name, rows in old.items():
                new = reader.read(name)
                assert len(new) == OLD + 7 and torch.equal(new[:OLD], rows[:OLD])
                for number in range(7):
                    of = spelled.encode(f"<|new {number}|>").ids if way == "pieces" else range(OLD)
                    mean = rows[list(of)].double().mean(0)
                    torch.testing.assert_close(new[OLD + number].double(), mean, rtol=0, atol=1e-7)


def test_drawn_rows_have_mean_and_covariance_of_the_old_ones():
    random = torch.Generator().manual_seed(0)
    old = torch.randn(200, 6, generator=random) @ torch.randn(6, 6, generator=random) + 3
    drawn = new_rows(old, AddedTokens(200, 40_200, "drawn", {}), 1).double()
    mean, wide = old.double().mean(0), old.double()
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.T.cov(), wide.T.cov(), rtol=0.05, atol=0.2)
    new = new_rows(wide, AddedTokens(200, 203, "mean", {}), 1)
    assert torch.equal(new, mean.repeat(3, 1))


@pytest.mark.peers
def test_an_import_extends_as_the_command_does(tmp_path, convert):
    write_model(tmp_path / "hf")
    add_tokens(tmp_path / "hf", tmp_path / "longer", 7)
    convert("hf-import", tmp_path / "hf", tmp_path / "run", "--unverified")
    words = ("--tokenizer-model", tmp_path / "longer")
    convert("extend-vocabulary", tmp_path / "run", tmp_path / "two", *words)
    words = (*words, "--extend-vocabulary", "pieces")
    said = convert("hf-import", tmp_path / "hf", tmp_path / "one", *words)
    assert "307 tokens" in said and not list(tmp_path.glob(".one*"))
    tensors = []
    for folder in ("one", "two"):
        with reading.load(tmp_path / folder).reader() as reader:
            tensors.append({name: reader.read(name) for name in reader.names()})
    same_tensors(*tensors)
    assert open_trained_model(str(tmp_path / "one"), device="cpu").tokenizer.vocab_size == OLD + 7


@pytest.mark.peers
def test_data_of_the_old_tokenizer_are_taken(tmp_path, convert):
    write_model(tmp_path / "hf")
    add_tokens(tmp_path / "hf", tmp_path / "longer", 4)
    convert("hf-import", tmp_path / "hf", tmp_path / "run", "--unverified")
    words = ("--tokenizer-model", tmp_path / "longer")
    convert("extend-vocabulary", tmp_path / "run", tmp_path / "long", *words)
    old = HuggingFaceTokenizer(str(tmp_path / "hf")).identity()
    new = HuggingFaceTokenizer(str(tmp_path / "long/huggingface")).identity()
    other = HuggingFaceTokenizer(str(tmp_path / "longer")).identity()
    (tmp_path / "text.json").write_text(json.dumps(description(old, OLD, {})))
    check(str(tmp_path / "text"), old)
    check(str(tmp_path / "text"), new)
    with raises(ValueError, "data-of-another-tokenizer", "--data-path"):
        check(str(tmp_path / "text"), other)  # nobody has compared it with the old one
    (tmp_path / "text.json").write_text(json.dumps(description(other, OLD + 4, {})))
    check(str(tmp_path / "text"), new)


@pytest.mark.peers
def test_a_tokenizer_that_moves_old_ids_is_refused(tmp_path, convert):
    write_model(tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "run", "--unverified")
    shutil.copytree(tmp_path / "hf", tmp_path / "moved")
    content = json.loads((tmp_path / "moved/tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "moved/tokenizer.json").write_text(json.dumps(content))
    for folder, code in (("moved", "vocabulary-ids-moved"), ("hf", "vocabulary-not-longer")):
        words = ("--tokenizer-model", tmp_path / folder)
        errors = convert("extend-vocabulary", tmp_path / "run", tmp_path / "x", *words, fails=True)
        assert codes_of([errors.strip().splitlines()[-1]]) == [code]
        assert not (tmp_path / "x").exists()
