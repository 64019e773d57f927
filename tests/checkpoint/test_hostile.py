"""Inputs made to harm: no code of theirs runs, nothing is written outside, and each is refused with
a clear error.

Checksums protect from accidents, not from people: everything here is forged with sums that are
right.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint import lock, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checksums import crc32
from megatron.config import command_line
from megatron.data.index_cache import IndexCache
from megatron.data.megatron_order import open_corpus
from megatron.data.tokenizers.build import build_tokenizer
from megatron.training.checkpointing import load, save, saved_args
from megatron.training.launch.control_file import ControlFile
from tests.checkpoint.forged import (
    Gadget,
    checkpoint,
    climbing_zip,
    first,
    gadget,
    huge_shape,
    manifest,
    put,
    read_all,
    rename_file,
    replaced,
    signed,
    small,
    torch_file,
    weights,
)
from tests.checkpoint.saves import Unsynced
from tests.forkrun import run_ranks
from tests.runs import SMALL
from tests.training.built_runs import built

SECONDS = 30
SPARE = 3 << 30  # bytes of address space that a case may add
REFUSED = (CheckpointError, ValueError, OSError)

# (make the input in a directory, read it)
Case = tuple[Callable[[Path], object], Callable[[Path], object]]


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


def fill_tracker(data: Callable[[], bytes]) -> Callable[[Path], object]:
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


CHECKPOINTS: dict[str, Case] = {
    "a pickle for the manifest": (put("manifest.json", gadget), read_all),
    "a pickle for the weights": (put("weights_00000.safetensors", gadget), read_all),
    "torch.save for the weights": (put("weights_00000.safetensors", torch_file), read_all),
    "a climbing zip for the weights": (put("weights_00000.safetensors", climbing_zip), read_all),
    "a climbing zip for the manifest": (put("manifest.json", climbing_zip), read_all),
    "a pipe for the manifest": (replaced("manifest.json", os.mkfifo), read_all),
    "a pipe for the weights": (replaced("weights_00000.safetensors", os.mkfifo), read_all),
    "a pipe for the args": (replaced("args", os.mkfifo), read_all),
    "an endless device for the state": (
        replaced("state.json", lambda path: path.symlink_to("/dev/zero")),
        read_all,
    ),
    "an endless device for the manifest": (
        replaced("manifest.json", lambda path: path.symlink_to("/dev/zero")),
        read_all,
    ),
    "a link to itself for the weights": (
        replaced("weights_00000.safetensors", lambda path: path.symlink_to(path)),
        read_all,
    ),
    "a folder for the manifest": (replaced("manifest.json", Path.mkdir), read_all),
    "a pickle for the tracker": (fill_tracker(gadget), read_all),
    "code for the tracker": (
        fill_tracker(lambda: b"__import__('os').system('touch canary')"),
        read_all,
    ),
    "a path for the tracker": (fill_tracker(lambda: b"../../outside"), read_all),
    "a number of 10000 digits for the tracker": (fill_tracker(lambda: b"9" * 10000), read_all),
    "Megatron-LM's pickled folder": (megatron_layout, read_all),
    "torch.distributed.checkpoint's pickled metadata": (distributed_layout, read_all),
    **{
        f"a manifest that names {what}": (manifest(rename_file(name)), read_all)
        for what, name in NAMES.items()
    },
    **{
        f"a manifest with {what}": (manifest(change), read_all)
        for what, change in MANIFESTS.items()
    },
    **{f"weights with {what}": (weights(change), read_all) for what, change in HEADERS.items()},
    **{f"weights with {what}": (weights(head=head), read_all) for what, head in HEADS.items()},
    **{what: (small("state.json", data), read_all) for what, data in STATES.items()},
}


# --- the flags in a checkpoint, and files that are not checkpoints


def use_args(root: Path) -> None:
    """--use-checkpoint-args, before torch would be loaded."""
    argv = [
        *SMALL[SMALL.index("--seq-length") :],
        "--mock-data",
        "--train-iters",
        "9",
        "--load",
        str(root / "run"),
        "--use-checkpoint-args",
    ]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            command_line.read(argv, {})
        except SystemExit as refused:
            raise ValueError(said.getvalue()) from refused


def resumed(change: Callable[[dict], object]) -> Case:
    """The state of a real run is another, and its sums are right; then a real load."""

    def make(root: Path) -> None:
        run = built("--save", str(root / "run"), "--save-interval", "10")
        run.progress.iteration = 20
        run.progress.consumed_train_samples = 160
        save.save_checkpoint(run)
        path = root / "run/iter_0000020/state.json"
        table = json.loads(path.read_bytes())
        change(table)
        path.write_text(json.dumps(table))
        listed = path.with_name("manifest.json")
        names = json.loads(listed.read_bytes())
        names["files"]["state.json"] = {
            "bytes": path.stat().st_size,
            "crc32": crc32(path.read_bytes()),
        }
        listed.write_bytes(signed(names))

    return make, lambda root: load.load_checkpoint(built("--load", str(root / "run")))


def args(text: bytes) -> Callable[[Path], object]:
    return small("args", lambda data: text)


def corpus(root: Path, index: bytes, data: bytes = b"\0" * 100) -> None:
    (root / "text.idx").write_bytes(index)
    (root / "text.bin").write_bytes(data)


def header(version: int, code: int, sequences: int, documents: int) -> bytes:
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, sequences, documents)


def cache_of_objects(root: Path) -> None:
    cache = IndexCache(str(root))
    cache.store("Kind", "text", {"a": np.arange(5)})
    np.save(
        next(root.glob("*-a.npy")),
        np.array([Gadget(os.environ["CANARY"])], dtype=object),
        allow_pickle=True,
    )


def read_cache(root: Path) -> None:
    if IndexCache(str(root)).load("Kind", "text", {"a": np.arange(5)}) is None:
        raise ValueError("not used, and said so above")


def files(**content: bytes) -> Callable[[Path], object]:
    return lambda root: [
        (root / name.replace("_", ".")).write_bytes(data) for name, data in content.items()
    ]


def gpt2(root: Path) -> object:
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(root / "vocab.json"), merge_file=str(root / "merges.txt")
    )


def model(kind: str) -> Callable[[Path], object]:
    return lambda root: build_tokenizer(kind, tokenizer_model=str(root / "model.json"))


def refused_lock(root: Path) -> None:
    lock.acquire(root)


def control(root: Path) -> None:
    if ControlFile(str(root / "control")).request(9) is None:
        raise ValueError("nothing asked for, and said so above")


OTHERS: dict[str, Case] = {
    "args with code for a number": (
        args(b"--num-layers __import__('os').system('touch_canary')"),
        use_args,
    ),
    "args with a shell's substitution": (args(b"--num-layers $(touch canary)"), use_args),
    "args that include a file": (
        args(b"--num-layers 2 @/etc/passwd"),
        lambda root: saved_args.saved_config(store.load(root / "run")),
    ),
    "args that are a pickle": (args(b"\x80\x02cos\nsystem\n(S'touch canary'\ntR."), use_args),
    "args of an unknown flag": (args(b"--exec 'touch canary'"), use_args),
    "args that are a pipe": (replaced("args", os.mkfifo), use_args),
    "a state without its schedule": resumed(lambda table: table.update(scheduler={})),
    "a state whose schedule is texts": resumed(
        lambda table: table["scheduler"].update(num_steps="touch canary")
    ),
    "a state without its optimizer": resumed(lambda table: table.update(optimizer={})),
    "a state without its layout": resumed(lambda table: table.update(layout={})),
    "a cached index of objects": (cache_of_objects, read_cache),
    "an index of 2^62 sequences": (
        lambda root: corpus(root, header(1, 8, 1 << 62, 1 << 62)),
        lambda root: open_corpus(str(root / "text")),
    ),
    "an index of unknown numbers": (
        lambda root: corpus(root, header(1, 99, 1, 2) + b"\0" * 40),
        lambda root: open_corpus(str(root / "text")),
    ),
    "a pickle for an index": (
        lambda root: corpus(root, gadget()),
        lambda root: open_corpus(str(root / "text")),
    ),
    "a pickled vocabulary": (
        lambda root: files(vocab_json=gadget(), merges_txt=b"a b")(root),
        gpt2,
    ),
    "a vocabulary that is a list": (files(vocab_json=b"[1]", merges_txt=b"a b"), gpt2),
    "merges that are code": (
        files(vocab_json=b'{"<|endoftext|>": 0}', merges_txt=b"__import__('os').system('x')"),
        gpt2,
    ),
    "a pickle for tiktoken": (lambda root: files(model_json=gadget())(root), model("TikTokenizer")),
    "code for tiktoken": (files(model_json=b"eval('1')"), model("TikTokenizer")),
    "a lock that is a pickle": (
        lambda root: (root / ".lock.000001").write_bytes(gadget()),
        refused_lock,
    ),
    "a lock that is a pipe": (lambda root: os.mkfifo(root / ".lock.000001"), refused_lock),
    "a control file with code": (
        lambda root: (root / "control").write_text("__import__('os').system('x')"),
        control,
    ),
}
CASES: dict[str, Case] = CHECKPOINTS | OTHERS


def outside(folder: Path) -> set[str]:
    """Every name around the directory of a case, and in it what may not appear."""
    return {path.name for path in folder.parent.iterdir()} | {
        path.name for path in Path.cwd().glob("canary*")
    }


def try_all(rank: int, world: int, home: str) -> dict[str, str]:
    """{case: what was said} of all cases, each in a directory of its own, in this one process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
    os.environ["CANARY"] = str(Path(home) / "canary")
    said = {}
    for number, (name, (make, read)) in enumerate(CASES.items()):
        folder = Path(home) / "cases" / f"case-{number}"
        folder.mkdir(parents=True)
        os.chdir(folder)
        make(folder)
        before = outside(folder)
        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            read(folder)
            said[name] = "it was read"
        except REFUSED as error:
            text = str(error)
            said[name] = (
                text if text and len(text) < 2000 else f"{len(text)} characters: {text[:100]}"
            )
        except BaseException as error:
            said[name] = f"not explained: {type(error).__name__} {error}"
        signal.alarm(0)
        if (
            outside(folder) != before
            or Path(os.environ["CANARY"]).exists()
            or (Path(home) / "outside").exists()
        ):
            said[name] = "it left something"
            Path(os.environ["CANARY"]).unlink(missing_ok=True)
    return said


def late(*_: object) -> None:
    raise TimeoutError("not explained: it took too long")


def test_no_hostile_input_does_harm(memory_path):
    said = run_ranks(1, try_all, str(memory_path), seconds=300)[0]
    for name, text in said.items():
        print(f"{name}: {text[:200]}")
    bad = {
        name: text
        for name, text in said.items()
        if text.startswith(("it was read", "it left", "not explained"))
        or " characters: " in text[:20]
    }
    assert not bad, bad
    assert len(said) >= 60, len(said)


def test_an_unrestricted_unpickler_would_run_the_payload(tmp_path, monkeypatch):
    """The gadgets work: what loads pickles runs them."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    for data in (gadget(), gadget(0)):
        pickle.loads(data)
        (tmp_path / "canary").unlink()
    torch.load(io.BytesIO(torch_file()), weights_only=False)
    (tmp_path / "canary").unlink()


def test_a_forged_manifest_that_changes_nothing_is_read(memory_path):
    """Forging itself is no reason to be refused."""
    manifest(lambda table: None)(memory_path)
    read_all(memory_path)
    small("state.json", lambda data: data)(memory_path / "small")
    read_all(memory_path / "small")
    weights(lambda table: None)(memory_path / "weights")
    read_all(memory_path / "weights")
