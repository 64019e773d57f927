"""Prints as JSON what is in a pickle: the only file in which anything is unpickled, started as a
program of its own, which imports nothing but Python's library.

Its input is a pickle, its output {"tensors": {path: [number format, key of the storage, numbers of
the storage, offset, shape, stride]}, "values": the rest} or {"wrong": what is wrong}. A path is
that of a tensor in nested dicts and lists, joined by dots; there the values have null. A Namespace
is a dict.

No name in a pickle leads to anything but the stand-ins below: `find_class` imports nothing, and a
name that is not listed ends the work, as does too much memory. So the worst file makes an error.
Not torch.load(weights_only=True): it knows the opcodes of torch.save alone, not those of the
.metadata of torch.distributed.checkpoint, and makes a bytearray of any size.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle  # noqa: TID251
import re
import resource
import sys
from typing import Any

MEMORY = 8 << 30  # bytes
_DCP = "torch.distributed.checkpoint."
_TENSOR = "torch._utils._rebuild_tensor_v2"
_TABLE = "collections.OrderedDict"
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_DTYPES = {f"torch.{name}" for name in _STORAGES.values()}
# names that are printed as the first argument of their call
_FIRST = ("torch._utils._rebuild_parameter", "torch.Size", "builtins.set", "__builtin__.set")
# ... as the state that is set on what they make
_STATE = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.mixed_precision_linkage.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    _DCP + "metadata.Metadata",
    _DCP + "metadata.TensorStorageMetadata",
    _DCP + "metadata.TensorProperties",
    _DCP + "metadata.ChunkStorageMetadata",
    _DCP + "metadata.MetadataIndex",
    _DCP + "filesystem._StorageInfo",
}
# ... and as null: enumerations in arguments, plans of saving in metadata, states of other libraries
_NOTHING = re.compile(
    r"(megatron|deepspeed|internlm|transformer_engine)\.[\w.]+|torch\.device|_codecs\.encode|"
    r"torch\.distributed\.checkpoint\.planner\w*\.\w+|torch\.serialization\._get_layout|"
    r"torch\.distributed\.checkpoint\.metadata\.(BytesStorageMetadata|StorageMeta|"
    r"_MEM_FORMAT_ENCODING)|datetime\.timedelta|pathlib\.(_local\.)?PosixPath|_io\.BytesIO|"
    r"signal\.(Signals|SIG\w+)|numpy\.(ndarray|dtype|_?core\.multiarray\.(_reconstruct|scalar))"
)
# Python 3.11.2 writes a member of an enumeration as getattr(its class, its name)
_MEMBER = ("builtins.getattr", "__builtin__.getattr")


class Refused(Exception):
    """What is wrong with the pickle."""


class Object:
    """Stands for what a name would have made: it keeps what it is called with, and its state."""

    state: Any = None

    def __init__(self, *args: Any, **more: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Table(dict):
    """Stands for collections.OrderedDict; a state dict's notes on it (_metadata) are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A stand-in that has the name of what it stands for."""
        full = f"{module}.{name}"
        if full == _TABLE:
            return Table
        known = {_TENSOR, *_FIRST, *_STATE, *_MEMBER, *_STORAGES, *_DTYPES}
        if full not in known and not _NOTHING.fullmatch(full):
            raise _refused_name(full)
        return type(full, (Object,), {})

    def persistent_load(self, pid: Any) -> tuple:
        """A storage: ("storage", its type, its key, where it was, its numbers)."""
        if not isinstance(pid, tuple) or len(pid) != 5:
            raise Refused("a persistent id that is no storage")
        return pid


def _refused_name(name: str) -> Refused:
    return Refused(
        f"its pickle names {name}, which is not among the names of plain tensors; it may be meant "
        "to run code, and is not read"
    )


def _plain(value: Any, path: str, tensors: dict[str, list]) -> Any:
    """`value` as JSON data; what it has of tensors goes to `tensors`."""
    if isinstance(value, Object):
        name = type(value).__name__
        if name == _TENSOR:
            (_, kind, key, _, numbers), offset, shape, stride = value.args[:4]
            if path in tensors:
                raise Refused(f"holds {path} twice")
            location = [_STORAGES[kind.__name__], key, numbers, offset, shape, stride]
            tensors[path] = [_plain(word, "", {}) for word in location]
            return None
        if name in _MEMBER and not _NOTHING.fullmatch(getattr(value.args[0], "__name__", "")):
            raise _refused_name(name)
        if name in _STATE:
            return _plain({} if value.state is None else value.state, path, tensors)
        return _plain(value.args[0] if name in _FIRST else None, path, tensors)
    if isinstance(value, type):
        return value.__name__ if value.__name__ in _DTYPES else None
    prefix = path and f"{path}."
    if isinstance(value, dict):
        words = {
            key: key if isinstance(key, str) else json.dumps(_plain(key, "", {})) for key in value
        }
        return {word: _plain(value[key], f"{prefix}{word}", tensors) for key, word in words.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item, f"{prefix}{n}", tensors) for n, item in enumerate(value)]
    return value if isinstance(value, (bool, int, float, str)) else None


def answer(data: bytes) -> str:
    """What is printed of a pickle."""
    try:
        tree = _Unpickler(io.BytesIO(data), encoding="utf-8").load()
        tensors: dict[str, list] = {}
        values = _plain(tree, "", tensors)
        return json.dumps({"values": values, "tensors": tensors})
    except Refused as error:
        wrong = str(error)
    except RecursionError:
        wrong = "its pickle is nested too deeply"
    # a stand-in at a place where another belongs, a broken pickle: always the file's fault
    except Exception as error:
        wrong = f"its pickle cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return json.dumps({"wrong": wrong})


if __name__ == "__main__":
    with contextlib.suppress(ValueError):  # it is less already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(answer(sys.stdin.buffer.read()))
