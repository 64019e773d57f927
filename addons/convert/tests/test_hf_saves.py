"""--save-hf-interval: each directory is the export of its iteration, byte for byte, or is not there.

The weights of a run are whole in every layout, one layer at a time in memory."""

from __future__ import annotations

import functools
import json
import os
import signal
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.addons.convert import families
from megatron.addons.convert.hf_files import HFFolder
from megatron.addons.convert.hf_saves import HFSaves
from megatron.addons.convert.huggingface import as_hf
from megatron.addons.convert.links import is_vocabulary
from megatron.addons.convert.live import RunModel, RunTensors
from megatron.addons.convert.options import FOLDER
from megatron.arguments import config_from
from megatron.checkpoint.filesystem import Disk
from megatron.features.registry import RunConfig
from megatron.inference.load_model import open_trained_model
from megatron.parallel.sharding import sharding_of
from megatron.training.result import Requests
from tests.core.training.tiny_run import BASE, make_run
from tests.forkrun import run_ranks
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--ffn-hidden-size 64"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --untie-embeddings-and-output-weights".split()
ZERO = "--use-distributed-optimizer"
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
SHARE = "--data-parallel-sharding-strategy"
FIELDS = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
    ffn_hidden_size=32,
)


def words(folder, *more: str) -> list[str]:
    """Four iterations, each second of which is saved in both forms."""
    saving = ["--save", str(folder / "save"), "--save-interval", "2", "--save-hf-interval", "2"]
    base = with_flags([*SMALL, *NO_DROPOUT, "--mock-data", "--train-iters", "4"], *more)
    return [*base, *LLAMA, *saving]


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written(folder) -> dict[str, dict[str, bytes]]:
    """The bytes of each directory by its name, hidden ones too."""
    return {path.name: files_of(path) for path in (folder / "save" / FOLDER).iterdir()}


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, []),
        pytest.param(4, [TP, "2", PP, "2", "--bf16", ZERO], marks=pytest.mark.campaign),
        pytest.param(
            4, [TP, "2", EP, "2", ZERO, *EXPERTS, "--sequence-parallel"], marks=pytest.mark.sweep
        ),
    ],
)
def test_a_directory_is_the_export_of_its_iteration(world, flags, tmp_path, convert):
    done = train(tmp_path, words(tmp_path, *flags), world)
    found = written(tmp_path)
    assert sorted(found) == ["iter_0000002", "iter_0000004"] and done.saved == [2, 4]
    for iteration in (2, 4):
        folder = tmp_path / f"export{iteration}"
        convert("hf-export", done.save, folder, "--ckpt-step", iteration, "--no-verify")
        assert found[f"iter_{iteration:07d}"] == files_of(folder)
    assert len(set(map(str, found.values()))) == 2, "nothing was learnt"


@pytest.mark.peers
def test_transformers_computes_the_logits_of_the_run(tmp_path):
    transformers = pytest.importorskip("transformers")
    done = train(tmp_path, words(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(done.save / FOLDER / "iter_0000004")
    ids = torch.randint(0, 211, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = open_trained_model(str(done.save), device="cpu").model(ids)
        torch.testing.assert_close(theirs.eval()(ids).logits, ours[..., :211], rtol=0, atol=1e-6)


# --- tensors


def negative_weights(rank: int, world: int, changes: dict) -> dict[str, torch.Tensor]:
    """All weights, their signs changed and small ones -0.0, as a rank has them."""
    run = make_run(rank, world, **FIELDS | changes)
    with torch.no_grad():
        for p in {
            id(held): held for held in map(run.buffers.held, run.model.parameters())
        }.values():
            p.copy_(torch.where(p.abs() < 0.005, -0.0, -p))
    tensors = RunTensors(run)
    for p in run.model.parameters():
        assert tensors.dtype(sharding_of(p).name) == p.dtype
    rows = {name: run.plan.vocab_size for name in tensors.names() if is_vocabulary(name)}
    return {name: tensors.whole(name)[: rows.get(name)].clone() for name in tensors.names()}


SHARED = dict(use_distributed_optimizer=True)
WHOLE = {
    "tp2": (2, dict(tensor_model_parallel_size=2)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),  # the embedding is on both stages
    "zero1": (2, SHARED),
    "zero3": (2, SHARED | dict(data_parallel_sharding_strategy="optim_grads_params")),
    "cp2": (2, dict(context_parallel_size=2)),
    "ep2": (2, dict(num_experts=2, expert_model_parallel_size=2)),
    "pp2, frozen, bf16": (
        2,
        dict(
            pipeline_model_parallel_size=2,
            fp64=False,
            bf16=True,
            train_only=("decoder.*",),
            num_experts=2,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
    ),
}
ALL = SHARED | dict(
    num_experts=2,
    expert_model_parallel_size=2,
    tensor_model_parallel_size=2,
    sequence_parallel=True,
)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *(pytest.param(*layout, id=name) for name, layout in WHOLE.items()),
        pytest.param(4, ALL, id="ep2 tp2 zero1", marks=pytest.mark.campaign),
    ],
)
def test_tensors_are_whole_on_every_rank_of_a_layout(world, layout):
    model = {key: x for key, x in layout.items() if "parallel" not in key and key not in SHARED}
    (alone,) = run_ranks(1, negative_weights, model)
    assert any(torch.signbit(x).logical_and(x == 0).any() for x in alone.values())
    for of_rank in run_ranks(world, negative_weights, layout):
        assert of_rank.keys() == alone.keys()
        for name, tensor in alone.items():
            assert torch.equal(of_rank[name].view(torch.uint8), tensor.view(torch.uint8)), name


class Census(TorchDispatchMode):
    """The most bytes of tensors, made inside it, that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in self._tensors((args, kwargs))}
        made = function(*args, **kwargs or {})
        for tensor in self._tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return made

    def _tensors(self, tree) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "experts"])
def test_a_layer_at_most_is_in_memory(experts, tmp_path):
    """Beyond the model, while a directory is written."""
    changes = dict(num_layers=6, hidden_size=64, ffn_hidden_size=128, num_experts=experts)
    run = make_run(save=str(tmp_path), save_hf_interval=1, **FIELDS | changes)
    saves = HFSaves(run, 1)
    run.progress.iteration = 1
    layers = [
        sum(p.nbytes for p in layer.parameters()) for layer in run.model[0].decoder.layers.values()
    ]
    model = sum(p.nbytes for p in run.model.parameters())
    assert model > 5 * max(layers)
    with Census() as census:
        saves.after_iteration(1, Requests())
    assert (tmp_path / FOLDER / "iter_0000001" / "config.json").is_file()
    assert max(p.nbytes for p in run.model.parameters()) <= census.most <= max(layers)


def test_shards_and_their_index(tmp_path):
    """All tensors, in files of the size that was asked for."""
    run = make_run(save=str(tmp_path), save_hf_interval=1, **FIELDS)
    saves = HFSaves(run, 1, shard_bytes=10_000)
    run.progress.iteration = 3
    saves.after_iteration(3, Requests())
    folder = tmp_path / FOLDER / "iter_0000003"
    shards = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(shards) > 3 and {path.name for path in shards} == set(index["weight_map"].values())
    entries = as_hf(RunModel(RunTensors(run), run, tmp_path)).tensors
    with HFFolder(folder) as written:
        assert written.headers().keys() == {entry.key for entry in entries}
        for entry in entries:
            assert torch.equal(written.read(entry.key), entry.data())


# --- what goes wrong


def at_step(react, action: str, number: int) -> None:
    """A hook: call `react(path)` before the number-th such action on a path in a directory."""
    seen: list[str] = []

    def step(self, name, path):
        if name == action and FOLDER in path.parts:
            seen.append(name)
            if len(seen) == number:
                react(path)

    Disk.step = step


def die(path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(path) -> None:
    raise OSError(28, "No space left on device")


def flip(path) -> None:
    """A disk that loses a bit of the shard."""
    shard = path.with_name("model.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("action", "number"),
    [("write", 2), pytest.param("rename", 2, marks=pytest.mark.campaign)],  # 1: shards' notes
)
def test_killed_while_it_is_written(action, number, tmp_path):
    """Nothing has the final name; the run that resumes writes it, and removes what was left."""
    hook = functools.partial(at_step, die, action, number)
    with pytest.raises(AssertionError, match="exit code -9"):
        train(tmp_path, words(tmp_path), hook=hook)
    left = written(tmp_path)
    assert left and all(name.startswith(".iter_0000002.") for name in left)
    train(tmp_path, [*words(tmp_path), "--load", str(tmp_path / "save")])
    train(tmp_path / "whole", words(tmp_path / "whole"))
    found, whole = written(tmp_path), written(tmp_path / "whole")
    assert sorted(found) == ["iter_0000002", "iter_0000004"] == sorted(whole)
    assert {name: files["model.safetensors"] for name, files in found.items()} == {
        name: files["model.safetensors"] for name, files in whole.items()
    }


@pytest.mark.parametrize(
    ("react", "action"), [(refuse, "write"), (flip, "rename")], ids=["full", "bit lost"]
)
def test_a_directory_that_the_disk_spoils_is_not_there(
    react, action, tmp_path, monkeypatch, capsys
):
    """A warning; what was there of the same iteration stays, and the next one is written."""
    monkeypatch.setattr(Disk, "step", Disk.step)
    run = make_run(save=str(tmp_path), save_hf_interval=1, **FIELDS)
    saves = HFSaves(run, 1)
    run.progress.iteration = 1
    saves.after_iteration(1, Requests())
    before = files_of(tmp_path / FOLDER / "iter_0000001")
    with torch.no_grad():
        run.model[0].embedding.word_embeddings.weight.mul_(2)
    at_step(react, action, 1)
    saves.after_iteration(1, Requests())
    assert "WARNING" in capsys.readouterr().out
    assert {path.name: files_of(path) for path in (tmp_path / FOLDER).iterdir()} == {
        "iter_0000001": before
    }
    saves.after_iteration(1, Requests())
    assert files_of(tmp_path / FOLDER / "iter_0000001") != before


def test_refused_before_training(tmp_path, monkeypatch):
    """What has no place in the format; what the tests compared no export of; a script's own
    model; a file in the way."""
    config = config_from(RunConfig, BASE | FIELDS | {"save": str(tmp_path)})
    assert families.why_not(config, tmp_path) == []
    ahead = config_from(RunConfig, BASE | FIELDS | {"save": str(tmp_path), "mtp_num_layers": 1})
    (reason,) = families.why_not(ahead, tmp_path)
    assert "mtp." in reason and "[not-converted]" in reason
    table = json.loads(families.VERIFIED.read_text())
    del table["families"]["llama"]
    (tmp_path / "table.json").write_text(json.dumps(table))
    monkeypatch.setattr(families, "VERIFIED", tmp_path / "table.json")
    (reason,) = families.why_not(config, tmp_path)
    assert "[export-not-verified]" in reason
    run = make_run(save=str(tmp_path), save_hf_interval=1, **FIELDS)
    run.plan = replace(run.plan, own_model="Theirs")
    (feature,) = [each for each in vars(run.config).values() if hasattr(each, "save_hf_interval")]
    with raises(ValueError, "own-model", "--save-hf-interval"):
        list(feature.hooks(type("Loop", (), {"run": run})))
