"""The one file that unpickles: what torch.save writes comes out, and no hostile file makes anything
happen but an error."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.addons.convert import torch_files
from megatron.addons.convert.links import ConversionError
from tools.shared import progress


def read(path: Path, *prefixes: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors, values) of a file."""
    file = torch_files.read_file(path, prefixes or ("",))
    return {name: part.read() for name, part in file.tensors.items()}, dict(file.values)


def test_reading_many_files_shows_bytes_and_eta(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(torch_files, "WORTH_SHOWING", 0)
    paths = {rank: tmp_path / f"{rank}.pt" for rank in range(4)}
    for rank, path in paths.items():
        torch.save({"x": torch.full((1000,), rank)}, path)
    files = torch_files.read_all(paths)
    assert [int(file.tensors["x"].read()[0]) for file in files.values()] == [0, 1, 2, 3]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("%")[0].strip() for line in lines] == ["25.0", "50.0", "75.0", "100.0"]
    assert all("GB" in line and "MB/s" in line and "ETA" in line for line in lines)


def test_what_torch_saves_comes_out(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "model": collections.OrderedDict(
            a=base[1:, ::2],
            b=base.t(),
            c=torch.nn.Parameter(base[0]),
            d=torch.tensor(5),
            e=torch.zeros(0, 3),
            f=base.to(torch.bfloat16),
            g=torch.ones(3) > 0,
        ),
        "nested": [{"x": base.half()}],
        "iteration": 7,
        "none": argparse.Namespace(),
        "optimizer": {"state": base},
        "args": argparse.Namespace(
            n=3, s="x", t=(1, 2), d=torch.float32, e=signal.SIGTERM, u={4}, p=Path("x")
        ),
    }
    tree["model"]._metadata = {"version": 1}
    torch.save(tree, tmp_path / "x.pt")
    tensors, values = read(tmp_path / "x.pt", "model.", "nested")
    assert set(tensors) == {f"model.{key}" for key in "abcdefg"} | {"nested.0.x"}
    for name in "abdefg":
        assert (
            torch.equal(tensors[f"model.{name}"], tree["model"][name])
            and tensors[f"model.{name}"].is_contiguous()
        )
    assert torch.equal(tensors["model.c"], base[0]) and tensors["nested.0.x"].dtype == torch.float16
    assert values.pop("model") == dict.fromkeys("abcdefg")
    assert values == {
        "optimizer": {"state": None},
        "nested": [{"x": None}],
        "none": {},
        "iteration": 7,
        "args": {
            "n": 3,
            "s": "x",
            "t": [1, 2],
            "d": "torch.float32",
            "e": None,
            "u": [4],
            "p": None,
        },
    }


def archive(path: Path, data: bytes, members: dict[str, bytes] | None = None, **options) -> Path:
    """A zip file of torch.save's layout with this pickle in it."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in (members or {}).items():
            file.writestr(name, content)
    return path


class Gadget:
    """Pickles as a call of something."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def gadgets(flag: str) -> dict[str, object]:
    """Objects whose unpickling would make the file `flag` or find something out."""
    code = f"open({flag!r}, 'w')"
    return {
        "os.system": Gadget(os.system, f"touch {flag}"),
        "eval": Gadget(eval, code),
        "exec": Gadget(exec, code),
        "open": Gadget(open, flag, "w"),
        "subprocess": Gadget(subprocess.Popen, ["touch", flag]),
        "import": Gadget(__import__, "antigravity"),
        "getattr": Gadget(getattr, "x", "upper"),
        "getattr of a stand-in": Gadget(getattr, argparse.Namespace, "__init__"),
        "signal": Gadget(signal.signal, signal.SIGTERM, None),
        "torch.load": Gadget(torch.load, flag),
        "map": Gadget(map, eval, [code]),
        "pickle": Gadget(pickle.loads, b"."),
        "chdir": Gadget(os.chdir, "/"),
        "exit": Gadget(sys.exit, 0),
        "type": Gadget(type, "x", (), {}),
        "bytearray": Gadget(bytearray, 1 << 40),
        "hub": Gadget(torch.hub.load, "a", "b"),
        "in a dict": {"model": {"a": Gadget(os.system, f"touch {flag}")}},
        "partial": Gadget(os.path.join, "/", "x"),
    }


@pytest.mark.parametrize(
    "written",
    [
        pickle.dumps({"e": Gadget(getattr, WriteItemType, "TENSOR")}, 2),
        pickle.dumps({"e": Gadget(getattr, WriteItemType, "TENSOR")}, 4),
        b"(dVe\ncsignal\nSIGTERM\ns.",  # of Python 3.11.2, as those before
        b"(dVe\ncpathlib._local\nPosixPath\n(Vx\ntRs.",  # 3.13
    ],
)
def test_what_other_versions_of_python_write(tmp_path, written):
    assert read(archive(tmp_path / "x.pt", written))[1] == {"e": None}


@pytest.mark.parametrize("name", gadgets(""))
def test_no_gadget_runs(name, tmp_path):
    flag = tmp_path / "flag"
    path = archive(tmp_path / "x.pt", pickle.dumps(gadgets(str(flag))[name]))
    before = os.getcwd()
    with pytest.raises(ConversionError, match="pickle names"):
        read(path)
    assert not flag.exists() and os.getcwd() == before


def opcodes(text: str) -> bytes:
    """A pickle by hand: protocol 0 lines."""
    return text.encode()


def storage(numel: int, key: str = "0", view: tuple | None = None) -> bytes:
    """A pickle of one tensor on a storage of so many numbers: of shape [numel], or with the offset,
    shape and stride of `view`."""

    class Key(str):
        pass

    class Writer(pickle.Pickler):
        def persistent_id(self, obj):
            return (
                ("storage", torch.FloatStorage, str(obj), "cpu", numel)
                if isinstance(obj, Key)
                else None
            )

    buffer = io.BytesIO()
    place = view or (0, (numel,), (1,))
    tensor = Gadget(
        torch._utils._rebuild_tensor_v2, Key(key), *place, False, collections.OrderedDict()
    )
    Writer(buffer, protocol=2).dump({"model": tensor})
    return buffer.getvalue()


REBUILD = "ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE = {
    "no zip": lambda p: p.write_bytes(b"\x80\x02}q\x00."),
    "empty": lambda p: p.write_bytes(b""),
    "no pickle in it": lambda p: zipfile.ZipFile(p, "w").close(),
    "two pickles": lambda p: archive(p, b".", {"b/data.pkl": b"."}),
    "cut short": lambda p: archive(p, pickle.dumps({"a": 1})[:-3]),
    "garbage": lambda p: archive(p, b"\xff\xfe\xfd"),
    "huge length": lambda p: archive(p, b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."),
    "compressed": lambda p: archive(p, b"." * 9999, compression=zipfile.ZIP_DEFLATED),
    "storage outside": lambda p: archive(p, storage(2, "../../../etc/passwd")),
    "absolute storage": lambda p: archive(p, storage(2, "/etc/passwd")),
    "storage missing": lambda p: archive(p, storage(2)),
    "storage short": lambda p: archive(p, storage(2), {"archive/data/0": b"1234"}),
    "storage long": lambda p: archive(p, storage(2), {"archive/data/0": b"1" * 9}),
    "storage of terabytes": lambda p: archive(p, storage(1 << 50), {"archive/data/0": b"1234"}),
    "big-endian": lambda p: archive(p, b"N.", {"archive/byteorder": b"big"}),
    "extension code": lambda p: archive(p, b"\x80\x02\x82\x01."),
    "unknown class": lambda p: archive(p, opcodes("cmymodule\nThing\n(tR.")),
    "nested names": lambda p: archive(p, b"\x80\x04\x8c\x05torch\x8c\x10serialization.io\x93."),
    "dotted escape": lambda p: archive(p, b"\x80\x04\x8c\x11collections\x8c\x0bOrderedDict\x93."),
    "other persistent id": lambda p: archive(p, opcodes("Pmodule\n.")),
    "tensor of nothing": lambda p: archive(p, opcodes(f"{REBUILD}(NNNNtR.")),
    "itself inside": lambda p: archive(p, b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s."),
    "deep": lambda p: archive(p, b"]" * 5000 + b"a" * 4999 + b"."),
    "state of a class": lambda p: archive(p, opcodes("ctorch\ndevice\n(dVx\nVy\nsb.")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_errors(name, tmp_path):
    HOSTILE[name](tmp_path / "x.pt")
    with pytest.raises(ConversionError):
        read(tmp_path / "x.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_a_view_beyond_its_storage_is_refused(tmp_path):
    members = {"archive/data/0": bytes(32)}
    good = archive(tmp_path / "good.pt", storage(8, view=(0, (2, 4), (4, 1))), members)
    assert read(good)[0]["model"].shape == (2, 4)
    for number, view in enumerate(
        (
            (1, (2, 4), (4, 1)),
            (0, (3, 4), (4, 1)),
            (0, (2, 4), (9, 1)),
            (-1, (2,), (1,)),
            (0, (2, 2), (1,)),
            (0, (1 << 63,), (0,)),
            (0, (2.0,), (1,)),
            (0, None, (1,)),
        )
    ):
        bad = archive(tmp_path / f"{number}.pt", storage(8, view=view), members)
        with pytest.raises(ConversionError):
            read(bad)


def test_a_flipped_bit_is_found(tmp_path):
    path = archive(tmp_path / "x.pt", storage(8), {"archive/data/0": b"12345678" * 4})
    data = bytearray(path.read_bytes())
    data[data.index(b"12345678") + 9] ^= 4
    path.write_bytes(data)
    with pytest.raises(ConversionError):
        read(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r\xff\xff\xff\xff.",  # a memo of 64 GB
        b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",  # a key whose hash overflows the stack
        pickle.dumps(Gadget(os.system, "touch flag")),
    ],
    ids=["memory", "stack", "gadget"],
)
def test_the_other_process_contains_what_a_pickle_does(data, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConversionError):
        read(archive(tmp_path / "x.pt", data))
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]
    torch.save({"model": torch.ones(2)}, tmp_path / "good.pt")
    assert torch.equal(read(tmp_path / "good.pt")[0]["model"], torch.ones(2))
