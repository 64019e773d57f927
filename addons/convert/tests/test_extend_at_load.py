"""--extend-vocabulary at --load: old rows and logits keep their bits in every layout, new rows are
what the formula says of the old ones, moments of new rows begin at zero, and the next load is an
ordinary one."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from megatron.addons.convert.added_tokens import AddedTokens
from megatron.addons.convert.longer_vocabulary import extend
from megatron.addons.convert.vocabulary import new_rows
from megatron.arguments import config_from, parse_typed
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.bpe import HuggingFaceTokenizer
from megatron.data.tokenizers.metadata import description
from megatron.features.registry import RunConfig
from megatron.inference.load_model import open_trained_model
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.build import build_run, make_tokenizer
from megatron.training.checkpointing.load import load_newest
from megatron.training.checkpointing.save import own_tensors
from megatron.training.launch.initialize import Runtime
from tests.forkrun import RanksFailed, run_ranks
from tests.pairs import PairWriter
from tests.runs import EXACT, NO_DROPOUT, SMALL, same_tensors, train, with_flags

pytestmark = pytest.mark.peers

OLD, NEW = 210, 431  # tokens; the second of two ranks has new ones alone
SAME = 214  # as many rows, with those that pad
SPELLED = range(1, 100, 2)
WORD, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MODELS = {"tied": (), "untied bf16": ("--untie-embeddings-and-output-weights", "--bf16")}


def write_tokenizer(folder, tokens: int) -> str:
    """Words w0, w1, ... and one end; a longer one has more words, some spelled by two old ones."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(OLD - 1)} | {"<|end|>": OLD - 1}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=None))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<|end|>"])
    engine.add_tokens(
        [f"w{n} w{2 * n}" if n in SPELLED else f"new{n}" for n in range(tokens - OLD)]
    )
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert HuggingFaceTokenizer(str(folder)).vocab_size == tokens
    return str(folder)


def tokenizer(folder: str) -> tuple[str, ...]:
    return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)


def data(place) -> tuple[str, ...]:
    return ("--data-path", f"{place}/text", "--data-cache-path", f"{place}/cache")


def words_of(place, folder: str, *flags: str) -> list[str]:
    """The command line of a run with the tokenizer of this folder, which says how many it has."""
    words = with_flags(SMALL, *tokenizer(f"{place}/{folder}"), *NO_DROPOUT, *data(place))
    at = words.index("--vocab-size")
    return with_flags(
        words[:at] + words[at + 2 :], "--eval-iters", "0", "--train-iters", "8", *flags
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two tokenizers, a corpus of the shorter one, and checkpoints of three steps with it."""
    place = tmp_path_factory.mktemp("extended")
    old = write_tokenizer(place / "old", OLD)
    write_tokenizer(place / "longer", NEW)
    write_tokenizer(place / "padded", SAME)
    random = np.random.default_rng(0)
    with PairWriter(place / "text", np.uint16) as builder:
        for _ in range(60):
            document = np.append(random.integers(0, OLD - 1, 40), OLD - 1)
            builder.add_document(document.astype(np.uint16), [len(document)])
    made_by = description(HuggingFaceTokenizer(old).identity(), OLD, {})
    (place / "text.json").write_text(json.dumps(made_by))
    for name, flags in MODELS.items():
        words = words_of(place, "old", *flags, "--exit-interval", "3", "--save", f"{place}/{name}")
        train(place / f"{name}_run", words)
    return place


def loaded(rank: int, world: int, words: list[str]) -> dict:
    """Of a rank after its load: logits of old ids, and its parts of all tensors."""
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), words))
    made = make_tokenizer(config)
    if config.LongerVocabularyConfig.extend_vocabulary:
        extend(made, config.checkpoint, type(config))
    plan = make_plan(config, world, made.vocab_size)
    ctx = ParallelContext(config.parallel, world, rank)
    runtime = Runtime(torch.device("cpu"), ctx, world, rank)
    run = build_run(config, plan, runtime, Timers(), made)
    assert load_newest(run, config.checkpoint) and run.progress.iteration == 3
    with torch.no_grad():
        logits = run.model[0](torch.arange(2 * 24).view(2, 24) * 4 % OLD)[..., :OLD]
    parts = [
        (name, sharding.shape, box, tensor.detach().clone())
        for name, sharding, _, own in own_tensors(run)
        for box, tensor in own
    ]
    return {"logits": logits, "parts": parts}


def whole(ranks: list[dict], size: int) -> dict[str, torch.Tensor]:
    """The tensors that ranks have parts of, those of the vocabulary without padding, which must be
    zeros."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, box, part in (each for rank in ranks for each in rank["parts"]):
        tensor = tensors.setdefault(name, torch.full(shape, float("nan"), dtype=part.dtype))
        tensor[tuple(slice(*span) for span in box)] = part
    for name in tensors:
        if name.endswith((WORD, HEAD)):
            assert not tensors[name][size:].any(), name
            tensors[name] = tensors[name][:size]
    return tensors


LAYOUTS = {
    "one rank": (1, ()),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "ZeRO-1": (2, ("--use-distributed-optimizer",)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_rows_keep_their_bits(place, model, layout):
    world, flags = LAYOUTS[layout]
    words = (*MODELS[model], *flags, "--load", f"{place}/{model}")
    before = run_ranks(world, loaded, words_of(place, "old", *words))
    longer = words_of(place, "longer", *words, "--extend-vocabulary", "pieces")
    after = run_ranks(world, loaded, longer)
    assert torch.equal(after[0]["logits"], before[0]["logits"])
    old, new = whole(before, OLD), whole(after, NEW)
    same_tensors(old, {name: new[name][: len(old[name])] for name in new})
    spelled = {OLD + n: [n, 2 * n] for n in SPELLED}
    added = AddedTokens(OLD, NEW, "pieces", spelled)
    grown = [name for name in new if name.endswith((WORD, HEAD))]
    assert len(grown) == (3 + ("untied" in model)) * (1 + ("untied" in model))
    for name in grown:
        rows = new[name][OLD:]
        if "exp_avg" in name:
            assert not rows.any() and new[name][:OLD].any(), name
            continue
        source = old.get(f"optimizer.fp32_param.{name}", old[name])
        assert torch.equal(rows, new_rows(source, added, 1).to(rows.dtype)), name
        assert torch.equal(
            rows[1], new_rows(source[[1, 2]], AddedTokens(2, 3, "mean", {}), 1)[0].to(rows.dtype)
        )


def test_the_next_load_is_an_ordinary_one(place, tmp_path):
    """A run that is killed after it extended goes on bit for bit, with the same command line; the
    data of the old tokenizer are taken by both."""
    save = ("--save-interval", "2", "--extend-vocabulary", "drawn")
    first = ("--load", f"{place}/tied", "--save", str(tmp_path / "a/save"))
    straight = train(tmp_path / "a", words_of(place, "longer", *save, *first))
    assert "--extend-vocabulary" in straight.log and len(straight.rows) == 5
    own = str(tmp_path / "b/save")
    first = words_of(place, "longer", *save, "--load", f"{place}/tied", "--save", own)
    train(tmp_path / "b", first, kill_at=4)
    (tmp_path / "b/log.0").unlink()
    again = words_of(place, "longer", *save, "--load", own, "--save", own)
    resumed = train(tmp_path / "b", again)
    assert resumed.resumes == [6]
    assert open_trained_model(str(resumed.save), device="cpu").tokenizer.vocab_size == NEW
    assert "--extend-vocabulary drawn:" not in resumed.log
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


def test_without_the_flag_another_vocabulary_is_refused(place, tmp_path):
    words = ("--load", f"{place}/tied")
    with pytest.raises(RanksFailed) as failure:
        train(tmp_path / "run", words_of(place, "longer", *words))
    assert "[checkpoint-of-another-tokenizer]" in str(failure.value)


@pytest.mark.parametrize("tokens", [SAME, NEW])
def test_a_finetuning_run_is_told_of_ids_without_a_row(place, tmp_path, tokens):
    """Refused; a warning where the padded sizes are the same, and the row is there."""
    folder = {SAME: "padded", NEW: "longer"}[tokens]
    words = words_of(place, folder, "--load", f"{place}/tied", "--finetune", "--mock-data")
    words = [word for word in words if word not in ("--data-path", f"{place}/text")]
    once = ("--train-iters", "1", "--lr-warmup-iters", "0")
    if tokens == SAME:
        said = train(tmp_path / "run", with_flags(words, *once)).first_rank_log
    else:
        with pytest.raises(RanksFailed) as failure:
            train(tmp_path / "run", words)
        said = str(failure.value)
        assert "[vocabulary-too-long]" in said
    assert f" {tokens - 1}" in said and "--extend-vocabulary" in said
    more = train(tmp_path / "more", with_flags(words, "--extend-vocabulary", "mean", *once))
    assert len(more.rows) == 1 and "WARNING" not in more.first_rank_log


def test_a_finetuning_run_may_have_fewer_ids(place, tmp_path):
    save = ("--save", str(tmp_path / "save"), "--train-iters", "1", "--lr-warmup-iters", "0")
    words = words_of(place, "padded", "--load", f"{place}/tied", "--extend-vocabulary", "mean")
    train(tmp_path / "more", with_flags(words, *save, "--finetune"))
    back = words_of(place, "old", "--load", str(tmp_path / "save"), "--finetune", *save[2:])
    assert len(train(tmp_path / "back", back).rows) == 1


@pytest.mark.parametrize("change", ["checkpoint-of-another-tokenizer", "vocabulary-ids-moved"])
def test_only_a_tokenizer_that_adds_tokens_is_taken(place, tmp_path, change):
    """Old files that were replaced, and a new tokenizer that gives an old token another id."""
    for name in ("old", "longer"):
        shutil.copytree(place / name, tmp_path / name)
    words = ("--load", str(tmp_path / "run"), "--extend-vocabulary", "mean")
    shutil.copytree(place / "tied", tmp_path / "run")
    if change == "vocabulary-ids-moved":
        file = tmp_path / "longer/tokenizer.json"
        file.write_text(
            file.read_text().replace('"w1":1,', '"w1":2,').replace('"w2":2,', '"w2":1,')
        )
        file.write_text(
            file.read_text().replace('"w1": 1,', '"w1": 2,').replace('"w2": 2,', '"w2": 1,')
        )
    else:
        (place / "old").rename(place / "hidden")
        shutil.copytree(place / "longer", place / "old")
    try:
        with pytest.raises(RanksFailed) as failure:
            train(
                tmp_path / "out",
                [
                    w.replace(f"{place}/longer", f"{tmp_path}/longer")
                    for w in words_of(place, "longer", *words)
                ],
            )
    finally:
        if (place / "hidden").exists():
            shutil.rmtree(place / "old")
            (place / "hidden").rename(place / "old")
    assert f"[{change}]" in str(failure.value)
