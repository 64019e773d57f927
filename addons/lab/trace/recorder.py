"""Records a training step on the meta device operation by operation: memory by kind, FLOPs,
launches, collectives; refuses what would stall or break a step on a GPU."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.kernels.cuda import fused_ops, torch_flash  # noqa: F401 (define the operations)
from megatron.timers import Timers

from .simulated_group import Message, message_of, on_wait, started

# Functions that may read a number from the device in a step: the sums of the step (loss, requests),
# the gradient norm, and with --log-num-zeros-in-grad and --log-params-norm these.
MAY_READ = {
    ("step_sums.py", "totals"),
    ("optimizer.py", "_measure"),
    ("optimizer.py", "params_norm"),
    ("clip_grads.py", "count_zeros"),
    ("moe/module.py", "sinkhorn"),
}
# These read how many copies of tokens go to each expert, or to each rank; the trace gives all as
# many. Counts are of all the copies that the layer sorted last.
ROUTES = {("moe/module.py", name) for name in ("by_all_gather", "by_all_to_all", "compute")}
# ... and this one where documents begin; the trace has one.
DOCUMENTS = ("cu_seqlens.py", "cumulative_lengths")
# ... and that may make large float64 tensors: angles of positions, sums of squares.
MAY_WIDEN = {
    ("rotary.py", None),
    ("clip_grads.py", None),
    ("step_sums.py", None),
    ("moe/module.py", None),
}
WIDE_FROM = 1024  # elements; a float64 tensor of fewer costs nothing
# Operations whose result depends on values on the device.
READS = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
}
COPIES = {"_to_copy", "copy_", "_foreach_copy_", "lift_fresh", "lift_fresh_copy"}
# Operations without a kernel.
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "resize_",
    "set_",
    "device",
    "record_stream",
}
# The rows of all groups, however many each has.
flop_registry[torch.ops.aten._grouped_mm] = lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1]
flop_registry[torch.ops.megatron.add_grouped_product_] = lambda total, a, b, *_, **__: (
    2 * a.numel() * b.shape[1]
)
# Of the same arguments.
flop_registry[torch.ops.megatron.flash_attention] = flop_registry[
    torch.ops.aten._flash_attention_forward
]
KINDS = {
    "batch-generator": "batch",
    "forward-compute": "activations",
    "backward-compute": "backward",
    "forward-backward": "communication",
    "all-grads-sync": "communication",
    "params-all-gather": "communication",
    "optimizer": "optimizer scratch",
}


WEIGHTS = "params-all-gather"
GRADIENTS = ("gradients", "whole gradients")  # kinds of memory that ranks sum
POINTS = 1024  # at most as many are kept of the memory over a step
PACKAGE = f"{Path(__file__).parent}/"


class TraceError(ValueError):
    """What would stall or break a step on a GPU, in one line with its place in the code."""


class SourceLine(NamedTuple):
    """A line of the suite's or the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Retained(NamedTuple):
    """Memory made in the step that outlives it."""

    nbytes: int
    operation: str
    line: SourceLine


class _Started(NamedTuple):
    """A collective or message that nothing has waited for; it writes these bytes of a storage."""

    handle: Any
    operation: str
    line: SourceLine
    storage: int
    span: tuple[int, int]
    phase: str


class _Storage(NamedTuple):
    """One piece of memory that is alive; `reference` calls back when it is freed."""

    reference: weakref.ref
    kind: str
    nbytes: int
    operation: str
    line: SourceLine
    in_step: bool


class Timeline:
    """Bytes by kind over the operations of a step: `points`, each the fullest moment of `every`
    operations."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, int]]] = []
        self.every = 1
        self._operations = 0

    def note(self, total: int, live: dict[str, int]) -> None:
        """After an operation."""
        if self._operations % self.every == 0:
            self.points.append((total, dict(live)))
        elif total > self.points[-1][0]:
            self.points[-1] = total, dict(live)
        self._operations += 1
        if self._operations == self.every * POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [max(pair, key=lambda point: point[0]) for pair in pairs]
            self.every *= 2


@contextmanager
def _on_resize(call: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """In this context `call` gets each storage that was given another size."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        call(storage)

    torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class StepRecorder(TorchDispatchMode, Timers):
    """While it is on, every operation of torch passes through it.

    `live` and `live_at_peak`: bytes by kind now and at the peak, `peak_operation`: where that was;
    `kind_peaks`: the most bytes of each kind at any moment; `activations`: the most that forward
    passes have left for backward; `timeline`: memory over the step; `operations`, `flops`: by name
    of the operation; `launches`: kernels by phase of the step; `messages` in order; `reductions`:
    those of gradients, and from where.
    """

    def __init__(
        self, rank: int, allow_float64: bool = False, expert_capacity: float | None = None
    ):
        """`expert_capacity`: --moe-expert-capacity-factor."""
        super().__init__()
        Timers.__init__(self)
        self.rank = rank
        self.expert_capacity = expert_capacity
        self.allow_float64 = allow_float64
        self.in_step = False
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.live_at_peak: dict[str, int] = {}
        self.peak_operation = ""
        self.kind_peaks: dict[str, int] = {}
        self.operations: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.messages: list[Message] = []
        self.reductions: list[tuple[Message, SourceLine]] = []
        self.activations = 0
        self.timeline = Timeline()
        self._spans: list[str] = ["build"]
        self._storages: dict[int, _Storage] = {}
        self._started: dict[int, _Started] = {}
        self._waits = on_wait(lambda handle: self._started.pop(id(handle), None))
        self._resizes = _on_resize(self._resized)
        self._copies = 0  # of tokens, that the last layer of experts sorted

    def __enter__(self) -> StepRecorder:
        self._waits.__enter__()
        self._resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(*error)
        self._waits.__exit__(*error)

    # The timers of the step say which phase it is in.
    @contextmanager
    def __call__(self, name: str, level: int = 0) -> Iterator[None]:
        """As `megatron.timers.Timers`: the span `name` of the step."""
        self._spans.append(name)
        try:
            yield
        finally:
            self._spans.pop()
            if name == "forward-compute":
                live_bytes = self.live["activations"] + self.live["communication"]
                self.activations = max(self.activations, live_bytes)

    def begin_step(self) -> None:
        """From here on it is the step: counts begin again, and rules hold."""
        self.in_step = True
        self.peak = self.total
        self.live_at_peak = dict(self.live)
        self.kind_peaks = dict(self.live)
        for counts in (self.operations, self.flops, self.launches, self.messages):
            counts.clear()

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Memory that was made while building is of this kind."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            storage = self._storages.get(key)
            if storage is not None and storage.kind != kind:
                self.live[storage.kind] -= storage.nbytes
                self.live[kind] += storage.nbytes
                self._storages[key] = storage._replace(kind=kind)

    def _kind(self, tensor: torch.Tensor) -> str | None:
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return None if storage is None else storage.kind

    def unnamed(self) -> list[Retained]:
        """Memory made while building that is of no kind, largest first."""
        storages = [
            Retained(storage.nbytes, storage.operation, storage.line)
            for storage in self._storages.values()
            if storage.kind == "build"
        ]
        return sorted(storages, reverse=True)

    def retained(self) -> list[Retained]:
        """Memory made in the step that is still there, largest first."""
        storages = [
            Retained(storage.nbytes, storage.operation, storage.line)
            for storage in self._storages.values()
            if storage.in_step
        ]
        return sorted(storages, reverse=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.messages.append(message_of(name, args, self.rank))
            if any(self._kind(tensor) in GRADIENTS for tensor in _tensors(args)):
                self.reductions.append((self.messages[-1], _calling_line()))
            out = func(*args, **kwargs)
            if self.in_step:
                self._start(func, args, out)
            return out
        inputs = list(_tensors((*args, *kwargs.values())))
        if self.in_step:
            self._check_devices(name, inputs)
            if self._started and not func.is_view and name not in NO_LAUNCH:
                self._check_arrived(name, inputs)
            if _reads(name, inputs, kwargs):
                return self._read(name, inputs)
            if name == "sort":
                self._copies = inputs[0].numel()
        out = func(*args, **kwargs)
        self._count(func, name, args, kwargs, out)
        for tensor in _tensors((out,)):
            if tensor.device.type == "meta":
                self._note_storage(name, tensor)
        if self.in_step:
            self.timeline.note(self.total, self.live)
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if not func.is_view and name not in NO_LAUNCH and func.namespace != "prim":
            self.operations[name] += 1
            self.launches[self._spans[-1]] += 1
        if func.overloadpacket in flop_registry:
            self.flops[name] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)

    def _check_devices(self, name: str, inputs: list[torch.Tensor]) -> None:
        """A number (0 dimensions) may come from the host, anything else only by a copy."""
        kinds = {tensor.device.type for tensor in inputs}
        if "meta" not in kinds or kinds == {"meta"} or name in COPIES:
            return
        strange = [tensor for tensor in inputs if tensor.device.type != "meta" and tensor.dim() > 0]
        if strange:
            shapes = ", ".join(f"{list(t.shape)} on {t.device.type}" for t in strange)
            raise TraceError(
                f"{_calling_line()}: {name} of a tensor {shapes} with tensors of the device; make "
                "it there (device=...) [trace-device-mixed]"
            )

    def _start(self, func: Any, args: Sequence[Any], out: Any) -> None:
        handle, written = started(func, args, out)
        if handle is None:
            return
        storage, span = (0, (0, 0)) if written is None else _span(written)
        name = self.messages[-1].operation
        self._started[id(handle)] = _Started(
            handle, name, _calling_line(), storage, span, self._spans[-1]
        )

    def _check_arrived(self, name: str, inputs: list[torch.Tensor]) -> None:
        for storage, (first, end) in map(_span, inputs):
            for transfer in self._started.values():
                start, stop = transfer.span
                if transfer.storage == storage and first < stop and start < end:
                    raise TraceError(
                        f"{_calling_line()}: {name} takes what the {transfer.operation} of "
                        f"{transfer.line} writes, and nothing has waited for it: call wait() of "
                        "its handle first [trace-missing-wait]"
                    )

    def check_waited(self) -> None:
        """Raise TraceError for a collective or message of the step that nothing waited for. Weights
        may arrive in the next step's forward pass (--overlap-param-gather)."""
        for transfer in self._started.values():
            if transfer.phase == WEIGHTS:
                continue
            raise TraceError(
                f"{transfer.line}: nothing waits for this {transfer.operation} in the "
                "step: call wait() of its handle [trace-missing-wait]"
            )

    def _read(self, name: str, inputs: list[torch.Tensor]) -> Any:
        """Zeros in place of the values that a listed function waits for."""
        line = _calling_line()
        where = (_file_name(line.file), line.function)
        if where == DOCUMENTS:
            self.operations["host sync"] += 1
            return torch.empty((1, inputs[0].dim()), dtype=torch.int64, device="meta")
        if where in ROUTES:
            self.operations["host sync"] += 1
            return self._shares(inputs[0])
        if where not in MAY_READ:
            raise TraceError(
                f"{line}: {name} makes the host wait for the device in the training step; "
                "keep the value on the device, or read it after the step [trace-host-sync]"
            )
        self.operations["host sync"] += 1
        if name == "_local_scalar_dense":
            return 0.0 if inputs[0].is_floating_point() else 0
        return torch.zeros(inputs[0].shape, dtype=inputs[0].dtype)

    def _shares(self, counts: torch.Tensor) -> torch.Tensor:
        """`counts` [..., experts] that are as equal as the copies sorted last allow, also those of
        consecutive experts, within the capacity."""
        experts = counts.shape[-1]
        copies = self._copies
        if self.expert_capacity is not None:
            most = experts * math.ceil(copies / experts * self.expert_capacity)
            copies = min(copies, most)
        shares = (torch.arange(experts + 1) * copies // experts).diff()
        return shares.expand(counts.shape)

    def _note_storage(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        line = _calling_line()
        if self.in_step:
            self._check_width(name, tensor, line)
        nbytes = storage.nbytes()
        kind = next((KINDS[span] for span in reversed(self._spans) if span in KINDS), "build")
        reference = weakref.ref(storage, partial(self._freed, key))
        self._storages[key] = _Storage(reference, kind, nbytes, name, line, self.in_step)
        self._grow(kind, nbytes, name, line)

    def _grow(self, kind: str, nbytes: int, name: str, line: SourceLine) -> None:
        self.live[kind] += nbytes
        self.total += nbytes
        self.kind_peaks[kind] = max(self.kind_peaks.get(kind, 0), self.live[kind])
        if self.total > self.peak:
            self.peak = self.total
            self.live_at_peak = dict(self.live)
            self.peak_operation = f"{self._spans[-1]}: {name} in {line}"

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Weights and gradients that are there for a while (megatron/parallel/fsdp.py) come and go
        without an operation of torch."""
        known = self._storages.get(storage._cdata)
        if known is not None:
            nbytes = storage.nbytes()
            self._storages[storage._cdata] = known._replace(nbytes=nbytes)
            self._grow(known.kind, nbytes - known.nbytes, "resize_", _calling_line())

    def _check_width(self, name: str, tensor: torch.Tensor, line: SourceLine) -> None:
        file = _file_name(line.file)
        if (
            tensor.dtype != torch.float64
            or self.allow_float64
            or tensor.numel() < WIDE_FROM
            or (file, None) in MAY_WIDEN
        ):
            return
        raise TraceError(
            f"{line}: {name} makes a float64 tensor {list(tensor.shape)}; a GPU computes it many "
            "times slower: give the dtype [trace-widened]"
        )

    def _freed(self, key: int, reference: weakref.ref) -> None:
        storage = self._storages.pop(key)
        self.live[storage.kind] -= storage.nbytes
        self.total -= storage.nbytes


def _reads(name: str, inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the host would wait for the device."""
    if not inputs or inputs[0].device.type != "meta":
        return False
    if name in ("_local_scalar_dense", *READS):
        return True
    device = kwargs.get("device")
    return name == "_to_copy" and device is not None and torch.device(device).type == "cpu"


def _span(tensor: torch.Tensor) -> tuple[int, tuple[int, int]]:
    """(Storage, first and last byte + 1 in it)."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    element_bytes = tensor.element_size()
    end = (last + 1) * element_bytes if tensor.numel() else first * element_bytes
    return tensor.untyped_storage()._cdata, (first * element_bytes, end)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _calling_line() -> SourceLine:
    """The innermost line of megatron/ (or of the program) that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((PACKAGE, "<")) and "/torch/" not in path and "/python3" not in path:
            return SourceLine(_below_the_top(path), frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return SourceLine("torch", 0, "unknown")


def _below_the_top(path: str) -> str:
    top, _, below = path.rpartition("/megatron/")
    return f"megatron/{below}" if top else Path(path).name


def _file_name(path: str) -> str:
    """A file's name, of a block's module with its folder."""
    name = Path(path).name
    return f"{Path(path).parent.name}/{name}" if name == "module.py" else name
