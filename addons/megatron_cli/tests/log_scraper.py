"""Reads a log back: one regular expression for each line that Megatron-LM (January 2024) prints and
we print too.

Written from Megatron-LM's log formats, and not from our
code, which this file does not import. A template's name says what the line is; its groups hold the
numbers. `LAST` are printed by the last rank, every other line by rank 0 (the parameter count by the
first rank of each model-parallel place).
"""

from __future__ import annotations

import re
from typing import NamedTuple

E6 = r"-?\d\.\d{6}E[+-]\d\d"
E3 = r"-?\d\.\d{3}E[+-]\d\d"
CLOCK = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
TWO = r"\d+\.\d\d"


def _wide(width: int, name: str) -> str:
    """An integer right-justified in `width` columns."""
    return rf"(?P<{name}>(?=.{{{width}}}) *\d{{1,{width}}}|\d{{{width},}})"


def _info(module: str, text: str) -> str:
    return rf"INFO:megatron\.core\.datasets\.{module}:{text}"


TEMPLATES = {
    "world size": r"using world size: (?P<world>\d+), data-parallel size: (?P<dp>\d+), "
    r"context-parallel size: (?P<cp>\d+) tensor-model-parallel size: (?P<tp>\d+), "
    r"pipeline-model-parallel size: (?P<pp>\d+) ",
    "parameter type": r"using torch\.(?P<dtype>float16|float32|bfloat16) for parameters \.\.\.",
    "arguments": r"-{24} arguments -{24}",
    "argument": r"  (?P<name>\w+) (?P<dots>\.+) (?P<value>.*)",
    "end of arguments": r"-{20} end of arguments -{21}",
    "micro-batches": r"setting number of micro-batches to constant (?P<n>\d+)",
    "tokenizer": r"> building (?P<type>\w+) tokenizer \.\.\.",
    "padded vocab": r" > padded vocab \(size: (?P<size>\d+)\) with (?P<dummies>\d+) dummy tokens "
    r"\(new size: (?P<padded>\d+)\)",
    "distributed": r"> initializing torch distributed \.\.\.",
    "tensor parallel": r"> initialized tensor model parallel with size (?P<size>\d+)",
    "pipeline parallel": r"> initialized pipeline model parallel with size (?P<size>\d+)",
    "seeds": r"> setting random seeds to (?P<seed>\d+) \.\.\.",
    "time to initialize": r"time to initialize megatron \(seconds\): (?P<seconds>\d+\.\d{3})",
    "after initialization": rf"\[after megatron is initialized\] datetime: {CLOCK} ",
    "building model": r"building GPT model \.\.\.",
    "parameters": r" > number of parameters on \(tensor, pipeline\) model parallel rank "
    r"\((?P<tp>\d+), (?P<pp>\d+)\): (?P<n>\d+)",
    "decay style": r"> learning rate decay style: (?P<style>[\w-]+)",
    "after model": r"\[after model, optimizer, and learning rate scheduler are built\] datetime: "
    rf"{CLOCK} ",
    "building datasets": r"> building train, validation, and test datasets \.\.\.",
    "target sizes": r" > datasets target sizes \(minimum size\):",
    "target train": r"    train:      (?P<n>\d+)",
    "target validation": r"    validation: (?P<n>\d+)",
    "target test": r"    test:       (?P<n>\d+)",
    "building GPT datasets": r"> building train, validation, and test datasets for GPT \.\.\.",
    "finished datasets": r"> finished creating GPT datasets \.\.\.",
    "after dataloaders": rf"\[after dataloaders are built\] datetime: {CLOCK} ",
    "done with setup": r"done with setup \.\.\.",
    "training": r"training \.\.\.",
    "before training": rf"\[before the start of training step\] datetime: {CLOCK} ",
    "after training": rf"\[after training is done\] datetime: {CLOCK} ",
    "evaluating": r"Evaluating on (?P<samples>\d+) samples",
    "evaluating iteration": r"Evaluating iter (?P<i>\d+)/(?P<n>\d+)",
    "skip train": r"skipping training \(--skip-train is on\) \.\.\.",
    "iteration": rf" iteration {_wide(8, 'n')}/{_wide(8, 'of')} \| consumed samples: "
    rf"{_wide(12, 'samples')} \| "
    r"elapsed time per iteration \(ms\): (?P<ms>\d+\.\d) \|(?: throughput per GPU \(TFLOP/s/GPU\): "
    rf"(?P<tflops>\d+\.\d) \|)? learning rate: (?P<lr>{E3}) \| global batch size: "
    rf"{_wide(5, 'batch')} \|"
    rf"(?: lm loss: (?P<loss>{E6}) \|)? loss scale: (?P<scale>\d+\.\d) \|"
    r"(?: grad norm: (?P<norm>\d+\.\d{3}) \|)?(?: num zeros: (?P<zeros>\d+\.\d) \|)?"
    r"(?: params norm: (?P<params>\d+\.\d{3}) \|)?"
    rf" number of skipped iterations: {_wide(3, 'skipped')} \|"
    rf" number of nan iterations: {_wide(3, 'nan')} \|",
    "timers": r"\(min, max\) time across ranks \(ms\):",
    "timer": rf"    (?=.{{48}}:)(?P<name>[a-z/-]+) (?P<dots>\.+): \((?P<min>{TWO}), "
    rf"(?P<max>{TWO})\)",
    "timers all": r"times across ranks \(ms\):",
    "timer all": r"  (?P<name>[a-z/-]+):",
    "timer rank": rf"     rank (?=.{{2}}:)(?P<rank> ?\d+): (?P<ms>{TWO})",
    "timers max": r"max time across ranks \(ms\):",
    "timer max": rf"    (?=.{{48}}:)(?P<name>[a-z/-]+) (?P<dots>\.+): (?P<max>{TWO})",
    "saving": rf"saving checkpoint at iteration {_wide(7, 'n')} to (?P<dir>\S+)",
    "saved": rf"  successfully saved checkpoint at iteration {_wide(7, 'n')} to (?P<dir>\S+)",
    "no tracker": r"WARNING: could not find the metadata file "
    r"(?P<file>\S+/latest_checkpointed_iteration\.txt) ",
    "from random": r"    will not load any checkpoints and will start from random",
    "loading": r" loading checkpoint from (?P<dir>\S+) at iteration (?P<n>\d+)",
    "version": r" checkpoint version (?P<version>3\.0)",
    "scheduler override": r" > overriding (?P<what>[a-z ]+) value to (?P<value>\S+)",
    "scheduler checkpoint": r" > using checkpoint value (?P<value>\S+) for (?P<what>[a-z ]+)",
    "loaded": r"  successfully loaded checkpoint from (?P<dir>\S+) at iteration (?P<n>\d+)",
    "split matrix": _info(
        "blended_megatron_dataset_config", r"Let split_matrix = (?P<matrix>\[.*\])"
    ),
    "index reader": _info("indexed_dataset", r"Load the _IndexReader from (?P<file>\S+\.idx)"),
    "extract": _info(
        "indexed_dataset",
        r"\tExtract the (?P<what>sequence lengths|sequence pointers|document indices)",
    ),
    "sequences": _info("indexed_dataset", r"> total number of sequences: (?P<n>\d+)"),
    "documents": _info("indexed_dataset", r"> total number of documents: (?P<n>\d+)"),
    "load indices": _info(
        "gpt_dataset", r"Load the GPTDataset (?P<split>train|valid|test) indices"
    ),
    "load index": _info(
        "gpt_dataset",
        r"\tLoad the (?P<what>document|sample|shuffle) index from "
        r"(?P<hash>[0-9a-f]{32})-GPTDataset-(?P=what)_index\.npy",
    ),
    "build indices": _info(
        "gpt_dataset", r"Build and save the GPTDataset (?P<split>train|valid|test) indices"
    ),
    "build index": _info(
        "gpt_dataset",
        r"\tBuild and save the (?P<what>document|sample|shuffle) index to "
        r"(?P<hash>[0-9a-f]{32})-GPTDataset-(?P=what)_index\.npy",
    ),
    "samples": _info("gpt_dataset", r"> total number of samples: (?P<n>\d+)"),
    "epochs": _info("gpt_dataset", r"> total number of epochs: (?P<n>\d+)"),
    "blend": _info("blended_dataset", r"> BlendedDataset length: (?P<n>\d+)"),
    "dashes": r"-{40,}",
    "validation": rf" validation loss at (?P<prefix>iteration \d+(?: on (?:validation|test) set)?) \| "
    rf"lm loss value: (?P<loss>{E6}) \| lm loss PPL: (?P<ppl>{E6}) \| ",
    "exit signal": rf"\[exiting program after receiving SIGTERM\.\] datetime: {CLOCK} ",
    "exit duration": rf"\[exiting program after (?P<minutes>\S+) minutes\] datetime: {CLOCK} ",
    "exit interval": rf"\[exiting program at iteration (?P<n>\d+)\] datetime: {CLOCK} ",
    "exit in evaluation": r"Exiting during evaluation, timelimit reached",
}
LAST = {
    "iteration",
    "timers",
    "timer",
    "timers all",
    "timer all",
    "timer rank",
    "timers max",
    "timer max",
    "dashes",
    "validation",
}
# Ours alone: what it is about, and why it is said.
OWN = {
    # what the flag was read as
    "skip ranges": r"skipping \d+ iterations?: --train-range-to-skip [\d ]+",
    # more than a twentieth is a lot
    "skip share": r"WARNING: --train-range-to-skip skips .*",
    "skip list": r"iterations to skip: .+",
    # on entry of a range
    "skipping": r"skipping iterations? \d+(?: to \d+)?: \d+ samples \(\d+ tokens\)",
    "skipped iteration": r" iteration .* number of nan iterations: +\d+ \| number of user-skipped iterations: "
    r"+\d+ \|",
    # every difference is said
    "learning rate jump": r" learning rate: \S+ from here on, \S+ by the checkpoint's schedule .*",
    "differs": r" differs from the checkpoint: \w+ was .*, is .*",
    # it was allowed to
    "data order": r"WARNING: the order of the data changes from iteration \d+ on: .*",
    "other world size": r" checkpoint was written by \d+ ranks?\b.*, this run has \d+ .*",
    "layout": r"> layout: \d+ ranks = pipeline \d+ x data \d+ x context \d+ x tensor \d+; rank 0 is "
    r"in the groups .*",
    # slow, where nothing was compiled
    "index helpers": r" > index helpers: numpy, because .*",
    "blend indices": r"INFO:megatron\.core\.datasets\.blended_dataset:(?:\t?Build and save|\t?Load|Build) "
    r"the .*",
    # what the run will read
    "data table": r"  split  data +documents +tokens +samples +share +epochs",
    "data row": r"  (?:train|valid|test) +\S.* [\d,]+ +[\d,]+ +[\d,]+ +[\d.]+ % +[\d.e+-]+",
    # what computes what
    "kernels": r"kernels on this \w+",
    "kernel": r"  (?:linear|output layer|weight "
    r"gradients|attention|LayerNorm|RMSNorm|gelu|swiglu|geglu|squared_relu|"
    r"rotary|cross entropy|dropout)[\w ()]*: .+ \(.+\)|  not used:|    .+ by .+ \(.+\)",
    # of a flag that changes nothing
    "no effect": r"\S.*(?:has no effect|have no effect|is given twice).*",
}
_COMPILED = {name: re.compile(text) for name, text in {**TEMPLATES, **OWN}.items()}


class Line(NamedTuple):
    """A line with the template it was read by (None: by no one) and the template's groups."""

    name: str | None
    fields: dict[str, str | None]
    text: str


def read_line(text: str) -> Line:
    """The first template that matches the whole line."""
    for name, template in _COMPILED.items():
        match = template.fullmatch(text)
        if match:
            return Line(
                name,
                {key: value and value.strip() for key, value in match.groupdict().items()},
                text,
            )
    return Line(None, {}, text)


def scrape(log: str) -> list[Line]:
    """Every line of a log."""
    return [read_line(text) for text in log.split("\n")[:-1]]
