"""How often a training step makes the host wait for the device: twice, after its last backward,
whatever its size.

On CUDA the host runs ahead of the device until it reads a number. A CPU waits for nothing, so reads
are counted where torch makes them: scalars and lists taken from tensors, copies to the host, and
operations whose shape depends on values.
"""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import block_attention
from megatron.parallel.random import DropoutSeeds
from megatron.training.batch import MicroBatch
from megatron.training.logging.subset_metrics import SubsetMetrics
from megatron.training.step import train_step
from tests.core.training.tiny_run import EOD, make_run, micro_batches
from tests.live_memory import LiveMemory
from tests.runs import plot

# Operations that read values on the host, or give shapes that depend on them.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
    "equal",
    "bincount",
    "repeat_interleave",
}
# Methods that need no operation for it.
METHODS = ("tolist", "numpy", "cpu", "__array__")


class HostReads(TorchDispatchMode):
    """The file of the product that asked for each read, with what it read by."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = []
        self.on = False
        self.seeds = []
        make = DropoutSeeds.tensor

        def noted(*args):
            self.seeds.append(make(*args))
            return self.seeds[-1]

        monkeypatch.setattr(DropoutSeeds, "tensor", noted)
        for name in METHODS:
            monkeypatch.setattr(
                torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name))
            )

    def note(self, how: str) -> None:
        frame = sys._getframe(1)
        while (
            frame
            and "/megatron/" not in frame.f_code.co_filename
            and "forward_step" not in frame.f_code.co_name
        ):
            frame = frame.f_back
        self.found.append(
            (frame.f_code.co_filename.rpartition("/megatron/")[2] if frame else "", how)
        )

    def _counting(self, name, method):
        def counted(*args, **kwargs):
            if self.on:
                self.note(name)
                with torch._C._DisableTorchDispatch():  # what it does inside is this one read
                    return method(*args, **kwargs)
            return method(*args, **kwargs)

        return counted

    def __enter__(self):
        self.on = True
        return super().__enter__()

    def __exit__(self, *error):
        self.on = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS and args[0].data_ptr() in [seed.data_ptr() for seed in self.seeds]:
            return func(*args, **(kwargs or {}))  # seeds of dropout are on the host on CUDA, too
        masks = (
            args[1]
            if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple))
            else ()
        )
        if name in READS or any(x is not None and x.dtype == torch.bool for x in masks):
            self.note(name)
        return func(*args, **(kwargs or {}))


def reads(monkeypatch, forward_step=None, **flags) -> list[tuple[str, str]]:
    """Those of a step of `flags`."""
    veto = flags.pop("veto", None)
    subsets = flags.pop("subsets", False)
    run = make_run(**{"fp64": False, "seq_length": 16, "max_position_embeddings": 16, **flags})
    run.before_update += [veto] if veto else []
    samples = torch.randint(
        0,
        50,
        (run.config.training.global_batch_size, 17),
        generator=torch.Generator().manual_seed(0),
    )
    batches = micro_batches(samples, 2)
    if subsets:
        run.counters.append(SubsetMetrics(["a"], run.runtime.ctx, accuracy=True, packed=False))
        of_subset = torch.cat((samples, torch.zeros_like(samples[:, :1])), 1)
        batches = iter([MicroBatch(rows, subset=True) for rows in of_subset.split(2)])
    with HostReads(monkeypatch) as host:
        outcome = train_step(run, forward_step or plot().forward_step, batches, 1)
    assert outcome.loss > 0
    return host.found


TWO = [("training/step_sums.py", "tolist"), ("optimizer/optimizer.py", "_local_scalar_dense")]
SCALED = [TWO[0], ("optimizer/optimizer.py", "tolist")]
STEPS = {
    "plain": ({}, TWO),
    "four micro-batches": (dict(global_batch_size=8), TWO),
    "four layers": (dict(num_layers=4), TWO),
    "dropout": (dict(hidden_dropout=0.1, attention_dropout=0.1), TWO),
    "bf16": (dict(bf16=True), TWO),
    "masks": (dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True), TWO),
    "llama": (
        dict(
            position_embedding_type="rope", swiglu=True, ffn_hidden_size=32, normalization="RMSNorm"
        ),
        TWO,
    ),
    "recompute": (
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        TWO,
    ),
    "fp16": (dict(fp16=True, initial_loss_scale=16.0), SCALED),
    "updates that may be vetoed": (dict(veto=lambda *numbers: None, clip_grad=0.0), TWO),
    "fp8, tensorwise": (dict(fp8="hybrid", fp8_recipe="tensorwise"), TWO),
    "fp8, delayed": (dict(fp8="hybrid"), TWO),
    "no clipping": (dict(clip_grad=0.0), TWO[:1]),
    "metrics of subsets": (dict(subsets=True), TWO),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_its_loss_and_its_norm(monkeypatch, name):
    flags, expected = STEPS[name]
    monkeypatch.setattr(block_attention, "read_ids", lambda device: False)  # as on CUDA
    assert reads(monkeypatch, **flags) == expected


@pytest.mark.parametrize(
    "look, how",
    [
        (lambda x: x.item(), "_local_scalar_dense"),
        (lambda x: bool(x > 0), "_local_scalar_dense"),
        (lambda x: float(x.detach()), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.detach().numpy(), "numpy"),
        (lambda x: x.view(1)[x.view(1) > 0], "index"),
        (lambda x: x.view(1).nonzero(), "nonzero"),
        (torch.isfinite, None),
    ],
)
def test_a_read_in_forward_and_in_backward_is_seen(monkeypatch, look, how):
    def forward_step(batch, model):
        loss, tokens, _ = plot().forward_step(batch, model)
        look(loss)
        loss.register_hook(hook)
        return loss, tokens

    def hook(grad):
        look(grad)

    # of two micro-batches, forward and backward
    more = [] if how is None else [("", how)] * 4
    found = reads(monkeypatch, forward_step)
    assert sorted(how for _, how in found) == sorted(how for _, how in more + TWO)


def test_shapes_do_not_depend_on_the_tokens(monkeypatch):
    """Two steps make tensors of the same shapes, wherever documents end; where the host reads the
    ids they need not."""

    def shapes(ends: list[int], iteration: int) -> set[tuple[int, ...]]:
        tokens = torch.zeros(2, 129, dtype=torch.long)
        tokens[:, ends] = EOD
        with LiveMemory() as memory:
            train_step(run, plot().forward_step, micro_batches(tokens, 2), iteration)
        return memory.shapes

    run = make_run(
        num_layers=1,
        global_batch_size=2,
        fp64=False,
        seq_length=128,
        max_position_embeddings=128,
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    shapes([5], 1)
    assert shapes([90], 2) != shapes([20, 70], 3)
    monkeypatch.setattr(block_attention, "read_ids", lambda device: False)  # as on CUDA
    assert shapes([90], 4) == shapes([20, 70], 5) == shapes([], 6)
