"""The walls stand in this tree, and each of them is seen to catch what it is there for in a tree
made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.walls import WALLS

ROOT = Path(__file__).resolve().parents[2]

# A small tree that breaks nothing; every plant below is laid over it.
SOUND = {
    "megatron/device.py": '"""Devices."""\nimport torch\n\nHAS = torch.cuda.is_available()\n',
    "megatron/log.py": '"""Lines."""\n',
    "megatron/config/model.py": '"""Shapes."""\nfrom dataclasses import dataclass\n',
    "megatron/data/cyclic_sampler.py": '"""Order."""\nimport torch\n\nfrom megatron import log\n',
    "megatron/data/tokenizers/bpe.py": '"""Ids."""\nimport tiktoken\n',
    "megatron/parallel/collectives.py": '"""Collectives."""\nimport torch.distributed as dist\n',
    "megatron/model/gpt.py": '"""GPT."""\nfrom megatron.parallel import collectives\n',
    "megatron/training/loop.py": '"""Loop."""\nSEEN = {}\n\n\ndef f(x):\n    SEEN = {}\n    SEEN[x] = 1\n    x.y = 2\n',
    "tools/generate.py": '"""Talk."""\nfrom megatron.training import loop\n',
    "pretrain_gpt.py": '"""Plot."""\n',
    "tests/peers/test_a.py": '"""A."""\nimport pytest\n\npytestmark = [pytest.mark.peers]\n'
    'pytest.importorskip("megatron.core")\nfrom megatron.core import x\n',
    "tests/test_b.py": '"""B."""\nimport pytest\nfrom megatron.log import x\nfrom tests.shared import y\n\n\n'
    '@pytest.mark.peers\ndef test_a():\n    pytest.importorskip("zstandard")\n',
}

DOC = '"""x."""\n'
# (wall, file, its text below DOC, a word of the violation); docstring_first gets the text alone
PLANTS = [
    (
        "floors",
        "megatron/data/order.py",
        "from megatron.training import loop\n",
        "floor 8 is not below floor 5",
    ),
    (
        "floors",
        "megatron/data/order.py",
        "import megatron.parallel.collectives\n",
        "floor 5 is not below",
    ),
    ("floors", "megatron/log.py", "from megatron import device\n", "floor 1 is not below"),
    (
        "floors",
        "megatron/data/x.py",
        "\n\ndef f():\n    from megatron.model import gpt\n",
        "floor 7 is not below",
    ),
    ("floors", "megatron/model/x.py", "from . import gpt\n", "relative import"),
    ("floors", "megatron/attic/x.py", "", "stands on no floor"),
    (
        "floors",
        "megatron/model/x.py",
        "from megatron.core import parallel_state\n",
        "stands on no floor",
    ),
    (
        "files_read_whole_by_one_door",
        "tools/x.py",
        "import json\n\nA = json.load(open('a'))\n",
        "json",
    ),
    (
        "files_read_whole_by_one_door",
        "megatron/data/x.py",
        "from pathlib import Path\n\nA = Path('a').read_bytes()\n",
        "Path",
    ),
    (
        "launcher_in_one_file",
        "megatron/training/x.py",
        'import os\nRANK = os.environ["SLURM_PROCID"]\n',
        "SLURM_PROCID",
    ),
    ("cycles", "megatron/config/model.py", "from megatron.config import model2\n", "import cycle"),
    (
        "cuda_in_one_file",
        "megatron/model/x.py",
        "import torch\n\ntorch.cuda.synchronize()\n",
        "torch.cuda",
    ),
    ("cuda_in_one_file", "megatron/model/x.py", "from torch import cuda\n", "torch.cuda"),
    (
        "cuda_in_one_file",
        "tools/x.py",
        "import torch\n\ntorch.backends.cudnn.benchmark = True\n",
        "cudnn",
    ),
    ("cuda_in_one_file", "pretrain_gpt.py", "\n\ndef f(t):\n    return t.cuda()\n", ".cuda()"),
    (
        "distributed_where_allowed",
        "megatron/model/x.py",
        "import torch.distributed as dist\n",
        "distributed",
    ),
    (
        "distributed_where_allowed",
        "megatron/training/x.py",
        "from torch import distributed\n",
        "distributed",
    ),
    (
        "distributed_where_allowed",
        "tools/x.py",
        "import torch\n\ntorch.distributed.barrier()\n",
        "distributed",
    ),
    (
        "libraries_in_one_file",
        "megatron/data/x.py",
        "import tiktoken\n",
        "only megatron/data/tokenizers/bpe.py",
    ),
    (
        "libraries_in_one_file",
        "megatron/kernels/x.py",
        "import transformer_engine.pytorch\n",
        "transformer_engine",
    ),
    (
        "libraries_in_one_file",
        "megatron/data/x.py",
        "\n\ndef f():\n    import pandas\n",
        "no file of its own",
    ),
    (
        "libraries_in_one_file",
        "megatron/data/x.py",
        'import importlib\n\nimportlib.import_module("apex")\n',
        "apex",
    ),
    ("torch_free", "megatron/config/plan/plan.py", "import torch.nn\n", "does without"),
    ("torch_free", "megatron/config/plan/plan.py", "import numpy as np\n", "does without"),
    ("torch_free", "megatron/data/x.py", "\n\ndef f():\n    import torch\n", "does without"),
    (
        "no_global_state",
        "megatron/log.py",
        "A = 1\n\n\ndef f():\n    global A\n    A = 2\n",
        "global A",
    ),
    ("no_global_state", "megatron/log.py", 'A = {}\n\n\ndef f():\n    A["x"] = 2\n', "global A"),
    ("no_global_state", "megatron/log.py", "A = []\n\n\ndef f():\n    A.append(2)\n", "global A"),
    (
        "no_global_state",
        "megatron/data/x.py",
        "from megatron import log\n\nlog.A = 1\n",
        "from outside",
    ),
    ("docstring_first", "megatron/data/x.py", "import os\n", "docstring"),
    ("docstring_first", "tools/x.py", "", "docstring"),
    ("docstring_first", "tests/x.py", "X = 1\n", "docstring"),
    ("no_code_from_data", "megatron/data/x.py", "import pickle\n", "pickle"),
    (
        "no_code_from_data",
        "tools/x.py",
        'import torch\n\ntorch.load("x", weights_only=True)\n',
        "torch.load",
    ),
    ("no_code_from_data", "tools/x.py", "from torch import load\n", "torch.load"),
    (
        "no_code_from_data",
        "tools/x.py",
        "\n\ndef f(g):\n    g(weights_only=False)\n",
        "weights_only",
    ),
    (
        "no_code_from_data",
        "tools/x.py",
        'import numpy as np\n\nnp.load("x", allow_pickle=True)\n',
        "allow_pickle",
    ),
    ("no_code_from_data", "megatron/log.py", 'eval("1")\n', "eval"),
    ("no_code_from_data", "megatron/training/unpickle_worker.py", "import pickle\n", "pickle"),
    ("no_code_from_data", "tools/unpickle_worker.py", "from pickle import loads\n", "pickle"),
    ("no_code_from_data", "megatron/checkpoint/x.py", "import pickle\n", "pickle"),
    (
        "no_code_from_data",
        "tools/convert/unpickle_worker.py",
        'import torch\n\ntorch.load("x")\n',
        "torch.load",
    ),
    (
        "no_code_from_data",
        "tools/convert/unpickle_worker.py",
        "import pickle\n\npickle.load(1)\n",
        "pickle.load",
    ),
    (
        "no_code_from_data",
        "tools/convert/unpickle_worker.py",
        "from pickle import loads\n",
        "pickle.loads",
    ),
    ("namespace_package", "megatron/data/__init__.py", "", "__init__.py"),
    (
        "tests_share_by_modules",
        "tests/x.py",
        "from tests.data.test_y import build\n",
        "tests.data.test_y.build",
    ),
    (
        "tests_share_by_modules",
        "tests/data/test_x.py",
        "import tests.data.test_y as y\n",
        "tests.data.test_y",
    ),
    (
        "tests_share_by_modules",
        "tests/data/test_x.py",
        "from tests.data import test_y\n",
        "tests.data.test_y",
    ),
    (
        "tests_share_by_modules",
        "tests/data/test_x.py",
        "def f():\n    from .test_y import build\n",
        ".test_y.build",
    ),
    (
        "peers_where_marked",
        "tests/data/test_x.py",
        "import pyarrow.parquet\n",
        "imports pyarrow.parquet",
    ),
    (
        "peers_where_marked",
        "tests/peers/test_x.py",
        "from megatron.core import x\n",
        "imports megatron.core.x",
    ),
    (
        "peers_where_marked",
        "tests/x.py",
        "try:\n    import orjson\nexcept ImportError:\n    pass\n",
        "imports orjson",
    ),
    (
        "peers_where_marked",
        "tests/test_x.py",
        'import pytest\n\npytest.importorskip("zstandard")\n',
        "the mark peers",
    ),
    (
        "peers_where_marked",
        "tests/test_x.py",
        "import pytest\n\n\nclass TestX:\n    @pytest.mark.campaign\n"
        '    def test_x(self):\n        a = pytest.importorskip("s3fs").core\n',
        "the mark peers",
    ),
    ("names_and_leftovers", "megatron/data/utils.py", "", "named after"),
    ("names_and_leftovers", "tools/x.py", "# TO" + "DO: later\n", "TO" + "DO"),
]


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("wall", WALLS)
def test_this_tree_keeps_the_wall(wall):
    violations = list(WALLS[wall](ROOT))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("wall", WALLS)
def test_a_sound_tree_raises_no_alarm(wall, tmp_path):
    plant(tmp_path, SOUND)
    assert list(WALLS[wall](tmp_path)) == []


@pytest.mark.parametrize(("wall", "file", "text", "word"), PLANTS)
def test_a_planted_violation_is_caught(wall, file, text, word, tmp_path):
    text = text if wall == "docstring_first" else DOC + text
    back = {"megatron/config/model2.py": DOC + "from megatron.config.model import x\n"}
    plant(tmp_path, SOUND | (back if wall == "cycles" else {}) | {file: text})
    violations = list(WALLS[wall](tmp_path))
    assert violations, "the wall let it through"
    assert all(word in line for line in violations), violations
    assert any(line.startswith(f"{file}:") for line in violations), violations


def test_every_wall_has_a_plant():
    assert {wall for wall, *_ in PLANTS} == set(WALLS)


def test_reading_the_configuration_loads_no_torch():
    files = sorted((ROOT / "megatron" / "config").glob("*.py"))
    assert files, "megatron/config is empty"
    names = [f"megatron.config.{file.stem}" for file in files]
    code = (
        f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint('torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
