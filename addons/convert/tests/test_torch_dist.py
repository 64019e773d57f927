"""tools/convert_checkpoint.py megatron-import of torch_dist: checkpoints of megatron-core's ranks,
and files of torch.distributed.checkpoint under Megatron's names, also hostile ones."""

from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import signal

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.addons.convert.megatron_names import args_for, flags_from
from megatron.addons.convert.tests.megatron_files import (
    IDS,
    LATENT,
    LLAMA,
    MODELS,
    SIZE,
    VOCAB,
    Call,
    assert_is_the_model,
    load_torch_dist_on_a_rank,
    logits_of,
    on_a_rank_torch_dist,
    unsaid,
    write_torch_dist,
)
from megatron.checkpoint.filesystem import Disk
from tests.core.model.tiny import tiny_config, tiny_model
from tests.forkrun import run_ranks
from tests.problems import assert_problem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MOE = LLAMA | dict(
    num_experts=4,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=32,
    moe_shared_expert_gate=True,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
EXPERTS = {"experts": MOE, "multi-token prediction, experts": MOE | dict(mtp_num_layers=2)}


def model_of(flags):
    return tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)


def expected(flags) -> torch.Tensor:
    with torch.no_grad():
        return model_of(flags)(IDS)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "layout", "metadata"),
    [
        pytest.param("llama", (2, 2), None, marks=pytest.mark.campaign),
        pytest.param(
            "gpt2",
            (2, 2),
            {"singleton_local_shards": True, "non_homogeneous_layers": True},
            marks=pytest.mark.sweep,
        ),
        pytest.param("experts", (2, 2), None, marks=pytest.mark.sweep),
        pytest.param("latent attention", (2, 2), None, marks=pytest.mark.campaign),
        pytest.param("multi-token prediction, experts", (2, 2), None, marks=pytest.mark.sweep),
        pytest.param("multi-token prediction, tied", (2, 1), None, marks=pytest.mark.sweep),
        pytest.param(
            "latent attention, queries of hidden states", (2, 1), None, marks=pytest.mark.sweep
        ),
        pytest.param("llama", (2, 1), {"singleton_local_shards": True}, marks=pytest.mark.sweep),
        pytest.param("llama tied, qkv bias", (1, 2), None, marks=pytest.mark.sweep),
        pytest.param("swiglu with biases, qk norm", (2, 2), None, marks=pytest.mark.sweep),
    ],
)
def test_checkpoints_of_megatron_core(name, layout, metadata, tmp_path, convert):
    """Layers and halves of gated matrices in one tensor, or each in its own."""
    pytest.importorskip("megatron.core")
    flags = {**MODELS, **EXPERTS}[name]
    tp, pp = layout
    run_ranks(tp * pp, on_a_rank_torch_dist, flags, tp, pp, tmp_path / "theirs", metadata)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", *unsaid(flags, tmp_path))
    assert_is_the_model(tmp_path / "ours", flags)


def tensors_of(flags, split: bool) -> dict[str, torch.Tensor]:
    """Our model's weights under Megatron's names: with `split` layers, experts and the halves of
    gated matrices each have a tensor of their own, else layers and experts are stacked."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    tensors = dict(model_of(flags).named_parameters())
    for name, value in tensors.items():
        value = value.detach()
        gated = ".linear_fc1." in name and bool(flags.get("swiglu"))
        experts = ".mlp.experts." in name
        name = name.replace(".mlp.experts.", ".mlp.experts.experts.")
        if not split:
            value = value.flatten(1, 2) if gated and experts else value
            value = value.flatten(0, 1) if gated and not experts else value
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                stacks.setdefault(".".join(parts[:2] + parts[3:]), []).append(value)
            else:
                found[name] = value
            continue
        rows = enumerate(value) if experts else [(None, value)]
        for expert, row in rows:
            key = (
                name
                if expert is None
                else name.replace(".experts.experts.", f".experts.experts.{expert}.")
            )
            if gated:
                found[key + "_w"], found[key + "_v"] = row.unbind(0)
            else:
                found[key] = row
    found |= {name: torch.stack(values) for name, values in stacks.items()}
    return {name: value.clone() for name, value in found.items()}


def write(folder, flags, tensors, **changes):
    """A torch_dist checkpoint of these tensors."""
    write_torch_dist(folder, flags, tensors, {"iteration": 7}, **changes)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("flags", [LLAMA, MOE], ids=["llama", "experts"])
def test_every_spelling_of_the_tensors(flags, split, tmp_path, convert):
    write(tmp_path / "theirs", flags, tensors_of(flags, split))
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    assert "optimizer" not in said
    torch.testing.assert_close(logits_of(tmp_path / "ours"), expected(flags), rtol=0, atol=0)


def test_norms_of_latents_inside_the_matrices_behind_them(tmp_path, convert):
    """As Transformer Engine's layers have them, the input's norm alone; exported so, too."""
    flags = LATENT | dict(q_lora_rank=24, qk_layernorm=True)
    tensors = tensors_of(flags, False)
    fused = {
        re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name): value
        for name, value in tensors.items()
    }
    assert len(fused.keys() - tensors.keys()) == 2
    mlp = fused.pop("decoder.layers.pre_mlp_layernorm.weight")
    fused["decoder.layers.mlp.linear_fc1.layer_norm_weight"] = mlp
    write(tmp_path / "theirs", flags, fused)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    torch.testing.assert_close(logits_of(tmp_path / "ours"), expected(flags), rtol=0, atol=0)
    convert("megatron-export", tmp_path / "ours", tmp_path / "back", "--ckpt-format", "torch_dist")
    keys = dcp.FileSystemReader(tmp_path / "back" / "release").read_metadata().state_dict_metadata
    assert {key for key in keys if "_extra_state" not in key} == fused.keys()


@pytest.mark.parametrize("name", ["llama", "gpt2", "experts"])
def test_exported_checkpoints_are_read_back(name, tmp_path, convert):
    """By this suite, and by torch.distributed.checkpoint itself."""
    flags = {**MODELS, "experts": MOE}[name]
    tensors = tensors_of(flags, False)
    write(tmp_path / "theirs", flags, tensors)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    words = ["--ckpt-format", "torch_dist"]
    convert("megatron-export", tmp_path / "ours", tmp_path / "back", *words)
    folder = tmp_path / "back" / "release"
    reader = dcp.FileSystemReader(folder)
    found = {
        key: torch.empty(entry.size)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if "_extra_state" not in key
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    usual = {
        key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            # Transformer Engine's layers have the norm before experts alone
            "pre_mlp_layernorm.",
            "pre_mlp_layernorm." if name == "experts" else "mlp.linear_fc1.layer_norm_",
        ): value
        for key, value in tensors.items()
    }
    assert found.keys() == usual.keys()
    for key, value in usual.items():
        rows = found[key][: len(value)] if "embedding" in key or "output" in key else found[key]
        assert torch.equal(rows, value), key
    convert("megatron-import", tmp_path / "back", tmp_path / "again")
    torch.testing.assert_close(logits_of(tmp_path / "again"), expected(flags), rtol=0, atol=0)


def test_an_export_writes_its_tensors_once(tmp_path, convert, monkeypatch):
    """They reach the process that saves them by memory; all other files are written by Disk."""
    write(tmp_path / "theirs", LLAMA, tensors_of(LLAMA, False))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    written = []
    real = Disk.write
    monkeypatch.setattr(
        Disk, "write", lambda self, *args: written.append(args[2]) or real(self, *args)
    )
    words = ["--ckpt-format", "torch_dist"]
    convert("megatron-export", tmp_path / "ours", tmp_path / "back", *words)
    size = (tmp_path / "back/release/__0_0.distcp").stat().st_size
    assert sum(map(len, written)) < size / 20


def test_a_full_disk_is_one_message(tmp_path, convert):
    write(tmp_path / "theirs", LLAMA, tensors_of(LLAMA, False))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    plain = (tmp_path / "ours").rglob("*.safetensors")
    limit = sum(path.stat().st_size for path in plain) // 2
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, kept[1]))
    try:
        words = ["--ckpt-format", "torch_dist"]
        said = convert("megatron-export", tmp_path / "ours", tmp_path / "back", *words, fails=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, before)
    assert said.count("error: ") == 1 and os.strerror(errno.EFBIG) in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("gpt2", (1, 2), marks=pytest.mark.campaign),
        pytest.param("experts", (2, 1), marks=pytest.mark.sweep),
        pytest.param("multi-token prediction, experts", (2, 1), marks=pytest.mark.campaign),
        pytest.param("llama", (2, 2), marks=pytest.mark.sweep),
        pytest.param("latent attention", (2, 2), marks=pytest.mark.sweep),
        pytest.param("multi-token prediction", (2, 2), marks=pytest.mark.sweep),
    ],
)
def test_megatron_core_loads_what_is_exported(name, layout, tmp_path, convert):
    """With strict checking, at a layout that the export does not know."""
    pytest.importorskip("megatron.core")
    flags = {**MODELS, **EXPERTS}[name]
    write(tmp_path / "theirs", flags, tensors_of(flags, False))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", *unsaid(flags, tmp_path))
    words = ["--ckpt-format", "torch_dist", "--transformer-impl", "local"]
    convert("megatron-export", tmp_path / "ours", tmp_path / "back", *words)
    tp, pp = layout
    folder = tmp_path / "back" / "release"
    run_ranks(tp * pp, load_torch_dist_on_a_rank, flags, tp, pp, folder)


@pytest.mark.parametrize(
    ("flags", "words", "said"),
    [
        (MOE, [], "--ckpt-format torch_dist"),
        (
            MOE | dict(moe_layer_freq="[0,1,1,1]"),
            ["--ckpt-format", "torch_dist"],
            "--moe-layer-freq",
        ),
    ],
)
def test_experts_that_cannot_be_exported(flags, words, said, tmp_path, convert):
    write(tmp_path / "theirs", flags, tensors_of(flags, True))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    assert said in convert(
        "megatron-export", tmp_path / "ours", tmp_path / "back", *words, fails=True
    )
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("types", "coefficients", "written"),
    [
        (("sinkhorn",), (0.0,), ("sinkhorn", 0.0)),
        (("aux_loss", "seq_aux_loss"), (0.1, 0.2), (["aux_loss", "seq_aux_loss"], [0.1, 0.2])),
    ],
)
def test_the_arguments_have_the_router_as_megatron_reads_it(types, coefficients, written):
    names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    flags = dict(zip(names, (types, coefficients), strict=True))
    args = args_for(tiny_config(num_experts=4, add_bias_linear=False, **flags), {}, experts=True)
    assert tuple(args[name] for name in names) == written
    back = flags_from(args, "args")
    assert {name: back[name] for name in names} == flags


def test_the_older_model_has_no_torch_dist(tmp_path, convert):
    write(tmp_path / "theirs", LLAMA, tensors_of(LLAMA, False))
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    words = ["--ckpt-format", "torch_dist", "--model", "legacy"]
    assert "--model" in convert(
        "megatron-export", tmp_path / "ours", tmp_path / "back", *words, fails=True
    )


def test_extra_states_are_skipped(tmp_path, convert):
    more = {
        "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1": {"amax": 1},
        "rng_state/shard_0.0_1.1": [1],
    }
    write(tmp_path / "theirs", LLAMA, tensors_of(LLAMA, True) | more)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")


FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
WRONG_TENSORS = {
    "missing": lambda t: t.pop(FC1),
    "one layer less": lambda t: t.update({FC1: t[FC1][:-1]}),
    "one expert less": lambda t: t.update({FC1: t[FC1][:, :-1].clone()}),
    "wrong shape": lambda t: t.update({NORM: torch.ones(65)}),
    "wrong dtype": lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)}),
    "extra": lambda t: t.update({"decoder.layers.mlp.linear_fc3.weight": torch.ones(4, 3)}),
    "twice": lambda t: t.update({"decoder.layers.0.mlp.router.weight": torch.ones(4, 64)}),
    "one half": lambda t: t.update({FC1 + "_w": t.pop(FC1)}),
    "scalar layers": lambda t: t.update({"decoder.layers.x.weight": torch.tensor(1.0)}),
    "no embedding": lambda t: t.pop("embedding.word_embeddings.weight"),
    "embedding by experts": lambda t: t.update(
        {"embedding.word_embeddings.weight": torch.tensor(1.0)}
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors(case, tmp_path, convert):
    tensors = tensors_of(MOE, False)
    WRONG_TENSORS[case](tensors)
    write(tmp_path / "theirs", MOE, tensors)
    assert "error: " in convert("megatron-import", tmp_path / "theirs", tmp_path / "o", fails=True)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "something was left behind"


def change_metadata(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def change_file(name, change):
    def do(folder, flag):
        path = folder / name
        path.write_bytes(change(bytearray(path.read_bytes())))

    return do


def in_metadata(change):
    return lambda folder, flag: change_metadata(folder, lambda m: change(m, flag))


def set_place(**values):
    def change(metadata, flag):
        info = next(iter(metadata.storage_data.values()))
        for name, value in values.items():
            setattr(info, name, value)

    return change


def chunk_of(metadata):
    return metadata.state_dict_metadata[NORM].chunks[0]


def payload_in_a_chunk(folder, flag):
    """A tensor's place names a file that is a pickle with a call."""
    torch.save(Call(flag), folder / "evil.distcp")
    size = (folder / "evil.distcp").stat().st_size
    place = set_place(relative_path="evil.distcp", offset=0, length=size)
    change_metadata(folder, lambda m: place(m, flag))


HOSTILE = {
    "call in .metadata": lambda folder, flag: (folder / ".metadata").write_bytes(
        pickle.dumps(Call(flag))
    ),
    "call in planner_data": in_metadata(lambda m, flag: setattr(m, "planner_data", Call(flag))),
    "call among the keys": in_metadata(lambda m, flag: m.storage_data.update({Call(flag): 1})),
    "call in common.pt": lambda folder, flag: torch.save(
        {"args": Call(flag)}, folder / "common.pt"
    ),
    "call in a chunk": payload_in_a_chunk,
    "no metadata": lambda folder, flag: (folder / ".metadata").unlink(),
    "no common.pt": lambda folder, flag: (folder / "common.pt").unlink(),
    "no data": lambda folder, flag: (folder / "__0_0.distcp").unlink(),
    "metadata is a list": lambda folder, flag: (folder / ".metadata").write_bytes(
        pickle.dumps([1])
    ),
    "metadata ends early": change_file(".metadata", lambda data: data[: len(data) // 2]),
    "metadata is a pipe": lambda folder, flag: (
        (folder / ".metadata").unlink(),
        os.mkfifo(folder / ".metadata"),
    ),
    "data ends early": change_file("__0_0.distcp", lambda data: data[: len(data) // 2]),
    "another format": lambda folder, flag: (folder / "metadata.json").write_text(
        '{"sharded_backend": "zarr"}'
    ),
    "fsdp_dtensor": lambda folder, flag: (folder / "metadata.json").unlink(),
    "metadata.json is a list": lambda folder, flag: (folder / "metadata.json").write_text("[]"),
    "outside the folder": in_metadata(set_place(relative_path="../x")),
    "absolute": in_metadata(set_place(relative_path="/etc/passwd")),
    "no file": in_metadata(set_place(relative_path=7)),
    "negative offset": in_metadata(set_place(offset=-5)),
    "offset beyond": in_metadata(set_place(offset=1 << 40)),
    "length zero": in_metadata(set_place(length=0)),
    "compressed": in_metadata(set_place(transform_descriptors=["zstd"])),
    "chunk of another shape": in_metadata(
        lambda m, flag: setattr(chunk_of(m), "sizes", torch.Size([32]))
    ),
    "chunk elsewhere": in_metadata(
        lambda m, flag: setattr(chunk_of(m), "offsets", torch.Size([32]))
    ),
    "no chunks": in_metadata(lambda m, flag: m.state_dict_metadata[NORM].chunks.clear()),
    "two chunks": in_metadata(
        lambda m, flag: m.state_dict_metadata[NORM].chunks.append(chunk_of(m))
    ),
    "chunks of numbers": in_metadata(
        lambda m, flag: setattr(m.state_dict_metadata[NORM], "chunks", [1, 2])
    ),
    "larger tensor": in_metadata(
        lambda m, flag: setattr(m.state_dict_metadata[NORM], "size", torch.Size([65]))
    ),
    "size of words": in_metadata(
        lambda m, flag: setattr(m.state_dict_metadata[NORM], "size", ["x"])
    ),
    "huge": in_metadata(
        lambda m, flag: setattr(m.state_dict_metadata[NORM], "size", torch.Size([1 << 50]))
    ),
    "no properties": in_metadata(
        lambda m, flag: setattr(m.state_dict_metadata[NORM], "properties", 3)
    ),
    "no storage": in_metadata(lambda m, flag: m.storage_data.clear()),
    "storage is a list": in_metadata(lambda m, flag: setattr(m, "storage_data", [])),
    "name is a number": in_metadata(
        lambda m, flag: m.state_dict_metadata.update({7: m.state_dict_metadata[NORM]})
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(case, tmp_path, convert):
    write(tmp_path / "theirs", LLAMA, tensors_of(LLAMA, False))
    HOSTILE[case](tmp_path / "theirs", tmp_path / "executed")
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "executed or left behind"
    if case in ("another format", "fsdp_dtensor"):
        assert_problem(said.strip(), "checkpoint-format-not-read", "torch_dist")


def test_a_flipped_bit_is_found(tmp_path, convert):
    tensors = tensors_of(LLAMA, False)
    write(tmp_path / "theirs", LLAMA, tensors)
    path = tmp_path / "theirs" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(bytes(tensors[NORM].numpy().tobytes())) + 5] ^= 4
    path.write_bytes(data)
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert NORM in said
    assert not (tmp_path / "ours").exists()
