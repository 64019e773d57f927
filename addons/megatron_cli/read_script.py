"""The command line of pretrain_gpt.py in a launch script, and the number of ranks that it starts,
without executing anything."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .expansion import Value, Variables

if TYPE_CHECKING:
    from .shell import Launch

GPT = "pretrain_gpt.py"
_BATCH = re.compile(r"^#SBATCH\s+(.*)$", re.M)
_SIZES = {
    "N": "nodes",
    "nodes": "nodes",
    "n": "ntasks",
    "np": "ntasks",
    "ntasks": "ntasks",
    "ntasks-per-node": "ntasks-per-node",
    "gpus-per-node": "gpus-per-node",
    "gres": "gpus-per-node",
    "nproc-per-node": "nproc-per-node",
    "num-gpus": "nproc-per-node",
    "nnodes": "nnodes",
    "num-nodes": "nnodes",
}


@dataclass
class Script:
    """The command line in a script. `words` follow `program`; `ranks` is None where the script does
    not say how many it starts."""

    words: list[str] = field(default_factory=list)
    launched: bool = False
    ranks: int | None = None
    program: str = GPT

    @property
    def unresolved(self) -> list[str]:
        """Names of the variables that the words still have."""
        return sorted(set(re.findall(r"\$\{?(\w+)", " ".join(self.words))))


def read_shell(text: str, variables: dict[str, str], folder: Path | None = None) -> Script:
    """The last command line that a script in `folder` starts. `variables`: those of the
    environment, as a user says they are; they win over the assignments of the script; "1", "2" ...
    are its parameters. Raises ValueError for a text that is no shell script."""
    from .shell import Shell

    batch = _sizes([word for line in _BATCH.findall(text) for word in shlex.split(line, True)])
    usual: dict[str, Value] = {
        name: os.environ[name] for name in ("HOME", "PWD", "USER") if name in os.environ
    }
    parameters = [variables.get(str(n), "") for n in range(1, 1 + sum(map(str.isdigit, variables)))]
    shell = Shell(
        Variables({**usual, **_slurm(batch), **variables}, parameters, frozenset(variables)),
        folder=folder,
    )
    shell.run(text)
    if not shell.launches:
        return Script()
    launch = shell.launches[-1]
    return Script(list(launch.words), True, _ranks(launch, batch), launch.program)


def _slurm(batch: dict[str, int]) -> dict[str, Value]:
    """The variables that SLURM sets in a job of these sizes."""
    nodes = batch.get("nodes")
    per_node = batch.get("ntasks-per-node")
    tasks = batch.get("ntasks", nodes * per_node if nodes and per_node else None)
    values = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_GPUS_ON_NODE": batch.get("gpus-per-node"),
        "SLURM_GPUS_PER_NODE": batch.get("gpus-per-node"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _sizes(words: list[str]) -> dict[str, int]:
    """The sizes among the options of a launcher: `--nodes 2`, `-N2`, `--gres=gpu:8`."""
    sizes = {}
    for n, word in enumerate(words):
        match = re.fullmatch(r"--?([A-Za-z][\w-]*?)(?:=(.*)|(\d+))?", word)
        name = _SIZES.get(match[1].replace("_", "-")) if match else None
        if match is None or name is None:
            continue
        value = match[2] or match[3] or (words[n + 1] if n + 1 < len(words) else "")
        number = re.search(r"(\d+)$", value.split("(")[0])
        if number:
            sizes[name] = int(number[1])
    return sizes


def _ranks(launch: Launch, batch: dict[str, int]) -> int | None:
    """The number of ranks of a launch in a job of the sizes `batch`; None where it is not said."""
    own = _sizes(list(launch.launcher))
    text = " ".join(launch.launcher)
    by_slurm = "srun" in launch.launcher
    nodes = own.get("nnodes") or own.get("nodes") or (batch.get("nodes") if by_slurm else None)
    if re.search(r"torchrun|torch\.distributed|deepspeed", text):
        per_node = own.get("nproc-per-node")
        if per_node is None and re.search(r"nproc.per.node[= ](gpu|auto)", text):
            per_node = batch.get("gpus-per-node")
        if per_node is None or (nodes is None and re.search(r"nnodes[= ]\$|num.nodes[= ]\$", text)):
            return None
        return per_node * (nodes or 1)
    if "ntasks" in own:
        return own["ntasks"]
    if not by_slurm:
        return None
    per_node = own.get("ntasks-per-node") or batch.get("ntasks-per-node")
    if per_node and nodes:
        return per_node * nodes
    return batch.get("ntasks")


def read_recipe(text: str) -> Script:
    """The command line of a recipe of Megatron's CI: the flags below `MODEL_ARGS:` in YAML."""
    script = Script()
    inside: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.match(r"\s*MODEL_ARGS:\s*$", line):
            inside = indent
            script.launched = True
        elif inside is not None and line.strip() and not line.lstrip().startswith("#"):
            if indent <= inside:
                inside = None
                continue
            match = re.match(r"\s*['\"]?(--[\w-]+)['\"]?:\s*(.*?)\s*(?:\s#.*)?$", line)
            if match:
                script.words += _flag_of(match[1], match[2])
    return script


def _flag_of(flag: str, value: str) -> list[str]:
    if value in ("true", "True", ""):
        return [flag]
    if value in ("false", "False", "null"):
        return []
    if value.startswith("[") and value.endswith("]"):
        return [flag, *value[1:-1].replace(",", " ").split()]
    quoted = re.fullmatch(r"'(.*)'|\"(.*)\"", value)
    return [flag, (quoted[1] or quoted[2] or "") if quoted else value]


def shown(words: list[str]) -> str:
    """Words as a shell takes them, variables left readable."""
    return " ".join(
        word if re.fullmatch(r"[\w${}./:,=@%+-]+", word) else shlex.quote(word) for word in words
    )
