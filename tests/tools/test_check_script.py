"""tools/check_script.py: the command line found in a script is the one that a shell would start, and
each flag's fate is named."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from tools import check_script
from tools.script.read_shell import ranks, read_recipe, read_shell

ARRAYS = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4
NODES=${NODES:-2}
WORLD=$(($GPUS*$NODES))
TP=2  # tensor
LAUNCH=(
    --nproc_per_node $GPUS   # on a node
    --nnodes $NODES
)
MODEL=(
    --num-layers 24 --hidden-size 1024
    --num-attention-heads 16   # heads
    --seq-length 1024 --max-position-embeddings 1024
)
TRAINING="
    --micro-batch-size 2 \\
    --global-batch-size $((WORLD * 8)) \\
    --train-iters 1000 --lr 1e-4 --bf16
"
MODEL+=(--swiglu)
if [ 1 = 1 ]; then
    TRAINING="$TRAINING --disable-bias-linear"
fi
EXTRA="--clip-grad 0.5"
torchrun ${LAUNCH[@]} pretrain_gpt.py \\
    "${MODEL[@]}" $TRAINING --tensor-model-parallel-size $TP ${EXTRA} \\
    ${MORE:-} ${FP8:+--fp8-format hybrid} --save 'my run' --save-interval 5 \\
    --mock-data --vocab-size "100" --use-mcore-models 2>&1 | tee log
echo done
"""


def test_the_words_are_those_that_bash_would_pass(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", ARRAYS], env={"PATH": path}, cwd=tmp_path, text=True, capture_output=True
    )
    passed = done.stdout.splitlines()
    at = passed.index("pretrain_gpt.py")
    script = read_shell(ARRAYS, {})
    assert script.words == passed[at + 1 : -1]
    assert script.unresolved == [] and ranks(script) == 8


def test_a_variable_that_is_given_wins():
    script = read_shell(ARRAYS, {"NODES": "4", "TP": "8"})
    assert ranks(script) == 16
    assert script.words[script.words.index("--tensor-model-parallel-size") + 1] == "8"
    assert script.words[script.words.index("--global-batch-size") + 1] == "128"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python pretrain_gpt.py --a $X", ["--a", "$X"]),
        ("A='1 2'\npython x/pretrain_gpt.py --a $A --b \"$A\"", "--a 1 2 --b '1 2'"),
        ("A=1; B=${A}x\nsrun python pretrain_gpt.py --a ${B} && echo", "--a 1x"),
        ('CMD="pretrain_gpt.py --a 1"\nbash -c "torchrun $CMD"', "--a 1"),
        ("A=$(date +%s)\npython pretrain_gpt.py --a $A -b", ["--a", "$(date +%s)", "-b"]),
        ('python pretrain_gpt.py "$@" --a 1 # --b 2', "--a 1"),
    ],
)
def test_small_scripts(text, words):
    expected = shlex.split(words) if isinstance(words, str) else words
    found = read_shell(text, {}).words
    assert [w for w in found if w] == expected or found == expected


RECIPE = """ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512  # wide
  --num-attention-heads: 8
  --bf16: true
  --fp16: false
  --lr: 1.5e-4
  --data-path: ${DATA}/text_document
  --cp-comm-type: [p2p]
  --attention-backend: "unfused"
TEST_TYPE: regular
"""


def test_a_recipe_of_the_ci():
    script = read_recipe(RECIPE)
    assert shlex.join(script.words[:8]) == (
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --bf16 --lr"
    )
    assert script.words[8:] == [
        *("1.5e-4", "--data-path", "${DATA}/text_document"),
        *("--cp-comm-type", "p2p", "--attention-backend", "unfused"),
    ]
    assert script.unresolved == ["DATA"]


def test_a_script_that_is_accepted(tmp_path, capsys):
    path = tmp_path / "run.sh"
    more = "--fp8-param-gather --layernorm-epsilon 1e-6 --wandb-host h"
    path.write_text(ARRAYS.replace("--use-mcore-models", f"--use-mcore-models {more}"))
    assert check_script.main([str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    fates = {line.split()[0]: line for line in out if line.startswith("  --")}
    assert "no effect" in fates["--use-mcore-models"] and "no effect" in fates["--wandb-host"]
    assert "--norm-epsilon" in fates["--layernorm-epsilon"]
    assert "bytes" in fates["--fp8-param-gather"]
    assert "torchrun --nproc-per-node 8 pretrain_gpt.py" in out[-1] and "'my run'" in out[-1]


def test_a_script_that_is_refused_names_every_flag(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(
        ARRAYS.replace("--use-mcore-models", "--multi-latent-attention --num-layer 3 --lr $LR")
    )
    assert check_script.main([str(path), "--world-size", "8"]) == 1
    out = capsys.readouterr().out
    for word in ("--multi-latent-attention", "--num-layer", "--lr", "LR"):
        assert word in out.split("keeps it from running")[1] or word == "LR" and word in out


def test_a_file_without_a_command_line_is_an_error(tmp_path, capsys):
    path = tmp_path / "x.sh"
    path.write_text("echo hello\n")
    assert check_script.main([str(path)]) == 1
    assert check_script.main([str(tmp_path / "none.sh")]) == 1
    assert capsys.readouterr().err.count("error: ") == 2
