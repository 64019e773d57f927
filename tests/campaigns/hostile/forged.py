"""Inputs made to harm, whose checksums are right: those protect from accidents, not from people.
Judges nothing; `tests.campaigns.hostile.kinds` says who reads them."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint import store
from megatron.checksums import crc32
from megatron.data.index_cache import IndexCache
from megatron.training.checkpointing.save import save_checkpoint
from tests.campaigns.hostile.mutations import SPECIAL, put_special
from tests.core.checkpoint.saves import Unsynced, save
from tests.core.training.built_runs import built

Make = Callable[[Path], object]  # writes an input in a folder
WEIGHTS = "weights_00000.safetensors"
FLAGS = (
    b"--num-layers 2\n--hidden-size 64\n--num-attention-heads 4\n"
    b"--seq-length 32\n--max-position-embeddings 32\n"
)


class Gadget:
    """Unpickled, it would leave a file behind."""

    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def gadget(protocol: int = 2) -> bytes:
    return pickle.dumps(Gadget(os.environ["CANARY"]), protocol)


def torch_file() -> bytes:
    """What torch.save makes of it."""
    buffer = io.BytesIO()
    torch.save({"model": Gadget(os.environ["CANARY"])}, buffer)
    return buffer.getvalue()


def climbing_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in ("../../canary", os.environ["CANARY"], "archive/data.pkl"):
            file.writestr(name, gadget())
    return buffer.getvalue()


def checkpoint(root: Path) -> Path:
    return save(root / "run", 20, Unsynced())


def put(name: str, data: Callable[[], bytes]) -> Make:
    """A checkpoint in which one file is replaced."""
    return lambda root: (checkpoint(root) / name).write_bytes(data())


def replaced(name: str, special: str) -> Make:
    """A checkpoint in which what is no file has a file's name."""
    return lambda root: put_special(checkpoint(root) / name, special)


def signed(table: dict) -> bytes:
    """A manifest's text with the right checksum."""
    body = json.dumps({key: value for key, value in table.items() if key != "crc32"})[1:]
    zeroed = ('{"crc32": "00000000",\n' + body + "\n").encode()
    return zeroed.replace(b"00000000", crc32(zeroed).encode(), 1)


def manifest(change: Callable[[dict], object]) -> Make:
    """A checkpoint whose manifest says something else."""

    def act(root: Path) -> None:
        path = checkpoint(root) / "manifest.json"
        table = json.loads(path.read_bytes())
        change(table)
        path.write_bytes(signed(table))

    return act


def resign(path: Path, data: bytes, end: bytes = b"") -> None:
    """Write a file of a checkpoint; its manifest has its size and the sum of `data` then."""
    path.write_bytes(data + end)
    listed = path.with_name("manifest.json")
    table = json.loads(listed.read_bytes())
    table["files"][path.name] = {"bytes": path.stat().st_size, "crc32": crc32(data)}
    listed.write_bytes(signed(table))


def small(name: str, data: Callable[[bytes], bytes]) -> Make:
    """A checkpoint in which one of the small files is another, and the manifest agrees."""

    def act(root: Path) -> None:
        path = checkpoint(root) / name
        resign(path, data(path.read_bytes()))

    return act


def weights(
    change: Callable[[dict], object] | None = None, head: Callable[[bytes], bytes] | None = None
) -> Make:
    """A checkpoint whose safetensors header is another, and the manifest agrees."""

    def act(root: Path) -> None:
        path = checkpoint(root) / WEIGHTS
        data = path.read_bytes()
        stop = 8 + int.from_bytes(data[:8], "little")
        if change:
            table = json.loads(data[8:stop])
            change(table)
            text = json.dumps(table).encode()
            resign(path, struct.pack("<Q", len(text)) + text, data[stop:])
        else:
            resign(path, head(data[8:stop]), data[stop:])

    return act


def first(table: dict) -> dict:
    return table["tensors"]["decoder.weight"]


def rename_file(new: str) -> Callable[[dict], object]:
    """The weights' file by another name, wherever the manifest has it."""

    def change(table: dict) -> None:
        table["files"][new] = table["files"].pop(WEIGHTS)
        for record in table["tensors"].values():
            for chunk in record["chunks"]:
                chunk["file"] = new

    return change


def huge_shape(table: dict) -> None:
    table["block_bytes"] = 1 << 30
    first(table).update(shape=[1 << 20, 1 << 20], chunks=[])
    first(table)["chunks"] = [
        {
            "file": WEIGHTS,
            "key": "decoder.weight",
            "bytes": 1 << 42,
            "box": [[0, 1 << 20]] * 2,
            "sums": ["00000000"] * (1 << 12),
        }
    ]


# --- checkpoints


NAMES = {
    "a path above": "../../outside",
    "an absolute path": "/etc/passwd",
    "a hidden name": ".bashrc",
    "a backslash": "..\\outside",
    "a NUL": "weights\0",
    "a line end": "weights\nx",
    "a name of no length": "",
    "a folder": "mp_rank_00/x",
    "a URL": "file:///etc/passwd",
    "a shell's": "$(touch canary)",
}
MANIFESTS: dict[str, Callable[[dict], object]] = {
    "a huge shape": huge_shape,
    "a length beyond 2^63": lambda t: t["files"]["args"].update(bytes=1 << 70),
    "a negative length": lambda t: t["files"]["args"].update(bytes=-1),
    "a length that is a text": lambda t: t["files"]["args"].update(bytes="1; rm"),
    "a box turned round": lambda t: first(t)["chunks"][0].update(box=[[20, 0], [0, 7]]),
    "a box outside": lambda t: first(t)["chunks"][0].update(box=[[0, 20], [0, 1 << 40]]),
    "no box": lambda t: first(t)["chunks"][0].pop("box"),
    "a dtype of objects": lambda t: first(t).update(dtype="object"),
    "a dtype that is a list": lambda t: first(t).update(dtype=["F32"]),
    "a thousand dims": lambda t: first(t).update(shape=[1] * 1000),
    "a block of 0 bytes": lambda t: t.update(block_bytes=0),
    "a block of 2^60 bytes": lambda t: t.update(block_bytes=1 << 60),
    "an iteration that is code": lambda t: t.update(
        iteration="__import__('os').system('touch canary')"
    ),
    "a class to make": lambda t: t.update(
        format={"__class__": "os.system", "args": ["touch canary"]}
    ),
    "a pickle format": lambda t: t.update(format="torch_dist", version=1),
    "tensors that are a list": lambda t: t.update(tensors=[1, 2]),
    "one chunk twice": lambda t: first(t).update(chunks=first(t)["chunks"] * 2),
    "a chunk missing": lambda t: first(t).update(chunks=[]),
    "another checksum": lambda t: t.update(checksum="none"),
    "a file that is not there": lambda t: t["files"].update(more={"bytes": 1, "crc32": "00000000"}),
}
HEADERS: dict[str, Callable[[dict], object]] = {
    "offsets beyond the file": lambda t: t["decoder.weight"].update(data_offsets=[0, 1 << 62]),
    "negative offsets": lambda t: t["decoder.weight"].update(data_offsets=[-560, 0]),
    "tensors that overlap": lambda t: t["decoder.weight"].update(
        data_offsets=t["scalar"]["data_offsets"]
    ),
    "a shape of 2^62": lambda t: t["decoder.weight"].update(shape=[1 << 62]),
    "a dtype OBJ": lambda t: t["decoder.weight"].update(dtype="OBJ"),
    "metadata that is code": lambda t: t.update(__metadata__={"format": {"eval": "1"}}),
    "another key": lambda t: t.update({"../x": t.pop("decoder.weight")}),
}
HEADS: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2^63 bytes": lambda text: struct.pack("<Q", 1 << 63) + text,
    "a header of 99 MB": lambda text: struct.pack("<Q", 99_000_000) + text,
    "a header 100000 deep": lambda text: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a header that is a pickle": lambda text: struct.pack("<Q", len(gadget())) + gadget(),
}
STATES: dict[str, Callable[[bytes], bytes]] = {
    "a state 5000 deep": lambda text: (
        b'{"version": 1, "rng": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5001
    ),
    "a state with code": lambda text: text.replace(b'"rng": {}', b'"__reduce__": "os.system"'),
    "a state with a number of 10000 digits": lambda text: text.replace(
        b'"rng": {}', b'"rng": {"a": %b}' % (b"9" * 10000)
    ),
    "a state that is a pickle": lambda text: gadget(0),
    "a counter that is a text": lambda text: text.replace(b'samples": 320', b'samples": "320"'),
}


def fill_tracker(data: Callable[[], bytes]) -> Make:
    def act(root: Path) -> None:
        checkpoint(root)
        store.discard(root / "run/iter_0000020", Unsynced())
        (root / "run" / store.TRACKER).write_bytes(data())

    return act


def megatron_layout(root: Path) -> None:
    """A folder of Megatron-LM's with a gadget where it unpickles."""
    folder = root / "run/iter_0000020/mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(torch_file())
    (root / "run" / store.TRACKER).write_text("20")


def distributed_layout(root: Path) -> None:
    """torch.distributed.checkpoint's metadata is a pickle."""
    folder = root / "run/iter_0000020"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(gadget())
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / "run" / store.TRACKER).write_text("20")


CHECKPOINTS: dict[str, Make] = {
    "a pickle for the manifest": put("manifest.json", gadget),
    "a pickle for the weights": put(WEIGHTS, gadget),
    "torch.save for the weights": put(WEIGHTS, torch_file),
    "a climbing zip for the weights": put(WEIGHTS, climbing_zip),
    "a climbing zip for the manifest": put("manifest.json", climbing_zip),
    "a pickle for the tracker": fill_tracker(gadget),
    "code for the tracker": fill_tracker(lambda: b"__import__('os').system('touch canary')"),
    "a path for the tracker": fill_tracker(lambda: b"../../outside"),
    "a number of 10000 digits for the tracker": fill_tracker(lambda: b"9" * 10000),
    "Megatron-LM's pickled folder": megatron_layout,
    "torch.distributed.checkpoint's pickled metadata": distributed_layout,
    **{
        f"{special} for {name}": replaced(name, special)
        for name in ("manifest.json", "state.json", "args", WEIGHTS)
        for special in SPECIAL
    },
    **{
        f"a manifest that names {what}": manifest(rename_file(name)) for what, name in NAMES.items()
    },
    **{f"a manifest with {what}": manifest(change) for what, change in MANIFESTS.items()},
    **{f"weights with {what}": weights(change) for what, change in HEADERS.items()},
    **{f"weights with {what}": weights(head=head) for what, head in HEADS.items()},
    **{what: small("state.json", data) for what, data in STATES.items()},
}


# --- flags and runs


def args(text: bytes) -> Make:
    """A checkpoint whose flags are these."""
    return small("args", lambda data: text)


ARGS: dict[str, Make] = {
    "code for a number": args(FLAGS + b"--num-layers __import__('os').system('touch_canary')"),
    "a shell's substitution": args(FLAGS + b"--num-layers $(touch canary)"),
    "a file included": args(FLAGS + b"@/etc/passwd"),
    "a pickle": args(b"\x80\x02cos\nsystem\n(S'touch canary'\ntR."),
    "a pipe": replaced("args", "pipe"),
}


def resumed(change: Callable[[dict], object]) -> Make:
    """The state of a real run is another."""

    def act(root: Path) -> None:
        run = built("--save", str(root / "run"), "--save-interval", "10")
        run.progress.iteration = 20
        run.progress.consumed_train_samples = 160
        save_checkpoint(run)
        path = root / "run/iter_0000020/state.json"
        table = json.loads(path.read_bytes())
        change(table)
        resign(path, json.dumps(table).encode())

    return act


RUNS: dict[str, Make] = {
    "a state without its schedule": resumed(lambda table: table.update(scheduler={})),
    "a state whose schedule is texts": resumed(
        lambda table: table["scheduler"].update(num_steps="touch canary")
    ),
    "a state without its optimizer": resumed(lambda table: table.update(optimizer={})),
    "a state without its layout": resumed(lambda table: table.update(layout={})),
}


# --- other files


def files(**content: bytes | Callable[[], bytes]) -> Make:
    """Files by name ("_" for "."), some with a gadget, which is made when it is needed."""

    def act(root: Path) -> None:
        for name, data in content.items():
            (root / name.replace("_", ".")).write_bytes(data() if callable(data) else data)

    return act


def header(version: int, code: int, sequences: int, documents: int) -> bytes:
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, sequences, documents)


def cache_of_objects(root: Path) -> None:
    IndexCache(str(root)).store("Kind", "text", {"a": np.arange(5)})
    objects = np.array([Gadget(os.environ["CANARY"])], dtype=object)
    np.save(next(root.glob("*-a.npy")), objects, allow_pickle=True)


PAIRS: dict[str, Make] = {
    "2^62 sequences": files(d_idx=header(1, 8, 1 << 62, 1 << 62), d_bin=bytes(100)),
    "unknown numbers": files(d_idx=header(1, 99, 1, 2) + bytes(40), d_bin=bytes(100)),
    "a pickle for an index": files(d_idx=gadget, d_bin=bytes(100)),
}
VOCABULARIES: dict[str, Make] = {
    "a pickle": files(vocab_json=gadget, merges_txt=b"a b"),
    "a list": files(vocab_json=b"[1]", merges_txt=b"a b"),
    "merges that are code": files(
        vocab_json=b'{"<|endoftext|>": 0}', merges_txt=b"__import__('os').system('x')"
    ),
}
TIKTOKEN: dict[str, Make] = {
    "a pickle": files(t_json=gadget),
    "code": files(t_json=b"eval('1')"),
}
LOCKS: dict[str, Make] = {
    "a pickle": lambda root: (root / ".lock.000001").write_bytes(gadget()),
    "a pipe": lambda root: os.mkfifo(root / ".lock.000001"),
}
