"""tools/check_script.py: the command line found in a script is the one that a shell would start, and
each flag's fate is named."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.addons.megatron_cli import check_script
from megatron.addons.megatron_cli.read_script import read_recipe, read_shell
from megatron.config import command_line
from megatron.config.plan import fit
from megatron.config.plan.plan import make_plan
from megatron.features.registry import RunConfig
from tests.problems import assert_reported

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


# {a whole launch script: (ranks, words and variables that it is started with)}
SCRIPTS = {
    "alcf.sh": (24, {"NGPUS": "24"}),
    "container.sbatch": (8, {}),
    "deepspeed.sh": (16, {}),
    "distributed_launch.sh": (16, {}),
    "gpt3_175b.sh": (1024, {"1": "out/175b", "2": "vocab/", "3": "some data"}),
    "llama3_8b_fp8.sh": (8, {}),
    "mixtral_8x7b.sh": (32, {"1": "out", "2": "tokenizer.model", "3": "data"}),
    "mpi.sh": (16, {}),
    "one_process.sh": (None, {}),
    "options.sh": (2, {"1": "--batch", "2": "2", "3": "--fast", "4": "--swiglu"}),
    "sizes.sh": (4, {"1": "1b"}),
    "slurm_arrays.sbatch": (128, {"SLURM_NNODES": "16"}),
    "slurm_torchrun.sbatch": (32, {"SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}),
    "sweep.sh": (2, {}),
    "written_job.sh": (16, {}),
}
# Stands in for each launcher: it keeps its words, but srun executes a shell.
STAND_IN = """#!/bin/bash
program=$(basename "$0")
for ((n = 1; n <= $#; n++)); do
    case ${!n} in bash|sh) [ $program = srun ] && exec "${@:n}" ;; esac
done
printf '%s\\0' "$@" > "$ARGV"
"""
LAUNCHERS = ("torchrun", "python", "python3", "srun", "mpirun", "mpiexec", "deepspeed")


def started(script: Path, folder: Path, given: dict[str, str]) -> list[str]:
    """The words after pretrain_gpt.py in the last command that bash starts."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (folder / "bin").mkdir()
    for name in (*LAUNCHERS, "module", "scontrol"):
        (folder / "bin" / name).write_text(STAND_IN)
        (folder / "bin" / name).chmod(0o755)
    (folder / "pretrain_gpt.py").touch()
    variables = {name: value for name, value in given.items() if not name.isdigit()}
    environ = {"PATH": f"{folder}/bin:/usr/bin:/bin", "ARGV": str(folder / "argv"), **variables}
    environ |= {"HOME": os.environ["HOME"], "PWD": str(folder)}
    words = [given[name] for name in sorted(given) if name.isdigit()]
    subprocess.run(["bash", str(script), *words], env=environ, cwd=folder, capture_output=True)
    passed = (folder / "argv").read_text().split("\0")[:-1]
    return passed[[word.rpartition("/")[2] for word in passed].index("pretrain_gpt.py") + 1 :]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_that_bash_passes(name, tmp_path, capsys):
    ranks, given = SCRIPTS[name]
    path = Path(__file__).parent / "launch_scripts" / name
    script = read_shell(path.read_text(), given)
    assert script.words == started(path, tmp_path, given)
    assert script.unresolved == [] and script.ranks == ranks
    code = check_script.main([str(path), *(f"{name}={value}" for name, value in given.items())])
    verdict = capsys.readouterr().out.splitlines()[0]
    assert (code, verdict.split(":")[0]) == (0, "accepted"), verdict
    assert ranks is None or f"{ranks} rank" in verdict


def test_the_words_of_arrays_and_strings(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(ARRAYS)
    script = read_shell(ARRAYS, {})
    assert script.words == started(path, tmp_path, {}) and script.ranks == 8


def test_a_variable_that_is_given_wins():
    script = read_shell(ARRAYS, {"NODES": "4", "TP": "8"})
    assert script.ranks == 16
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
        ("uv run python -m torch.distributed.run pretrain_gpt.py --a 1", "--a 1"),
        (
            "f() { X=2; echo --a $1; if [ $X = 2 ]; then echo --b 2; fi; }\nX=1\n"
            'python pretrain_gpt.py $(f 1) "$(f 3)" --c $X',
            "--a 1 --b 2 '--a 3\n--b 2' --c 1",
        ),
    ],
)
def test_small_scripts(text, words):
    expected = shlex.split(words) if isinstance(words, str) else words
    found = read_shell(text, {}).words
    assert [w for w in found if w] == expected or found == expected


def test_files_beside_a_script_are_followed(tmp_path):
    (tmp_path / "args.sh").write_text("A='--a 1'\n")
    (tmp_path / "go.sh").write_text(
        'source "$(cd here && pwd)/args.sh"\ntorchrun pretrain_gpt.py $A $1'
    )
    (tmp_path.parent / "outside.sh").write_text("python pretrain_gpt.py --b 2\n")
    start = "bash ./go.sh --c\nsource ../outside.sh\nbash ../outside.sh\n"
    assert read_shell(start, {}, tmp_path).words == ["--a", "1", "--c"]


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


def sections(out: str) -> dict[str, str]:
    """{title: its lines} of a report."""
    blocks = [block.partition(":\n") for block in out.split("\n\n")[1:]]
    return {title.partition(" (")[0]: text for title, _, text in blocks}


def test_a_script_that_is_accepted(tmp_path, capsys):
    path = tmp_path / "run.sh"
    more = "--fp8-param-gather --layernorm-epsilon 1e-6 --wandb-host h"
    path.write_text(ARRAYS.replace("--use-mcore-models", f"--use-mcore-models {more}"))
    assert check_script.main([str(path)]) == 0
    out = capsys.readouterr().out
    found = sections(out)
    assert "--use-mcore-models" in found["no effect"] and "--wandb-host h" in found["no effect"]
    assert "--layernorm-epsilon 1e-6: read as --norm-epsilon" in found["what differs"]
    assert "--fp8-param-gather" in found["what differs"] and "--swiglu" in found["supported"]
    last = out.splitlines()[-1]
    assert "torchrun --nproc-per-node 8 pretrain_gpt.py" in last and "'my run'" in last


def test_many_ranks_end_with_the_command_that_judges_them(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(ARRAYS)
    assert check_script.main([str(path), "NODES=4"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(last)
    assert words[:2] == ["python", "pretrain_gpt.py"] and "my run" in words
    path.write_text(ARRAYS.replace(" pretrain_gpt.py", " /opt/Megatron-LM/pretrain_gpt.py"))
    assert check_script.main([str(path), "NODES=4"]) == 0  # which is not Megatron's
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[:2] == words[:2]
    assert words[words.index("--world-size") + 1] == "16" and "--device-memory" in words


def test_device_memory_gives_the_verdict(tmp_path, capsys):
    """Of 3.9 million parameters per rank on a large and on a tiny device; the dry run says the
    same."""
    path = tmp_path / "run.sh"
    path.write_text(ARRAYS)
    for nodes in ("2", "4"):
        assert check_script.main([str(path), f"NODES={nodes}", "--device-memory", "80"]) == 0
        assert "80.00 GiB" in sections(capsys.readouterr().out)["memory"]
    assert check_script.main([str(path), "--device-memory", "1"]) == 1
    found = sections(capsys.readouterr().out)
    assert "1.00 GiB" in found["memory"] and "--use-distributed-optimizer" in found["memory"]
    words = read_shell(ARRAYS, {}).words
    line, problems = command_line.planned([*words, "--device", "cuda"], 8, RunConfig)
    assert not problems
    most = fit.fullest(line.config, make_plan(line.config, 8, 100)).total
    assert f"{most / fit.GIB:.2f} GiB" in found["memory"]


def test_a_script_that_is_refused_names_every_flag(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(
        ARRAYS.replace("--use-mcore-models", "--vision-pretraining --num-layer 3 --lr $LR")
    )
    assert check_script.main([str(path), "--world-size", "8"]) == 1
    out = capsys.readouterr().out
    keeps = sections(out)["what keeps it from running"]
    assert all(word in keeps for word in ("--vision-pretraining", "--num-layer", "--lr"))
    assert ": LR;" in out.splitlines()[1]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("python pretrain_gpt.py --tensor-model-parallel-size 2", None),
        ("torchrun --nproc_per_node=4 --nnodes=$N pretrain_gpt.py", None),
        ("torchrun --nproc_per_node=4 --nnodes=1:3 pretrain_gpt.py", 12),
        ("srun -N 2 --ntasks-per-node=4 python pretrain_gpt.py", 8),
        ("srun -n6 python pretrain_gpt.py", 6),
        ("#SBATCH -n 12\nsrun python pretrain_gpt.py", 12),
        (
            "#SBATCH --nodes=2 --gpus-per-node=4\nsrun torchrun --nproc_per_node gpu pretrain_gpt.py",
            8,
        ),
    ],
)
def test_the_number_of_ranks(text, ranks):
    assert read_shell(text, {}).ranks == ranks


def test_a_world_size_that_is_not_said_is_named(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text("python pretrain_gpt.py --tensor-model-parallel-size 2")
    check_script.main([str(path)])
    assert "assumed 2" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; }\nf",
        "while true; do :; done",
        'eval "$X" \'a',
        "X=x\n" + "X=$X$X\n" * 40,
        "( ( (",
    ],
)
def test_a_script_without_an_end_is_one_error(text, tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(text)
    assert check_script.main([str(path)]) == 1
    assert capsys.readouterr().err.count("error: ") == 1


def test_a_file_without_a_command_line_is_an_error(tmp_path, capsys):
    path = tmp_path / "x.sh"
    path.write_text("echo hello\n")
    assert check_script.main([str(path)]) == 1
    assert check_script.main([str(tmp_path / "none.sh")]) == 1
    assert capsys.readouterr().err.count("error: ") == 2


CONTROL = """
A=1
if [ $A = 2 ]; then
    B=two  # of a branch
elif [ $A = 3 ]  # then what
then
    B=three
    # before the last
else
    # first of all
    B=other; if true; then B=${B}s; fi
    # a comment behind a clause
fi # then
case $A in
    1) while [ $A -lt 3 ]  # until
       do A=$((A + 1)); if [ $A = 2 ]; then continue; fi; done ;;  # do
    *) B=never ;;
esac
C=
for then in x y  # of two
do  # it
    C="$C$then"
done
if [ "$B" = others ]; then :; else B=wrong; fi  # else
# if this then that
python pretrain_gpt.py --b $B --a "$A" --c $C --d then fi
"""


def test_control_words_and_comments(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(CONTROL)
    words = started(path, tmp_path, {})
    assert read_shell(CONTROL, {}).words == words and words[:4] == ["--b", "others", "--a", "3"]


@pytest.mark.parametrize("text", ["$(($N / ${M:-$(f)}))", "$(( ${N} / ${M} ))"])
def test_a_sum_that_is_not_known_is_one_word(text):
    script = read_shell(f"X={text}\nY=${{X}}\npython pretrain_gpt.py --a $Y --b 1", {})
    assert len(script.words) == 4


def launch(folder: Path, *words: str, program: str = "pretrain_own.py") -> Path:
    """A launch script of a program, with `words` and what each run needs."""
    path = folder / "run.sh"
    path.write_text(shlex.join(["torchrun", "--nproc-per-node", "2", program, *words, *NEEDED]))
    return path


NEEDED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 "
    "--lr 1e-4 --mock-data --vocab-size 100"
).split()
PROVIDER = """
def add_args(parser):
    group = parser.add_argument_group("own")
    group.add_argument("--loss-factor", "-z", type=float, default=1.0)
    group.add_argument("--twice", action="store_true")
"""


def test_flags_of_a_script_of_one_s_own(tmp_path, capsys):
    path = launch(tmp_path, "--loss-factor", "2", "--twice")
    assert check_script.main([str(path)]) == 0
    absent = capsys.readouterr().out
    assert "--loss-factor --twice" in absent.splitlines()[1]
    (tmp_path / "pretrain_own.py").write_text(PROVIDER)
    assert check_script.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert sections(out)["of the script itself"].split() == ["--loss-factor", "2", "--twice"]
    assert shlex.split(out.splitlines()[-1])[3] == "pretrain_own.py"
    assert check_script.main([str(launch(tmp_path, "--loss-facto", "2"))]) == 1
    assert "--loss-facto" in sections(capsys.readouterr().out)["what keeps it from running"]
    (tmp_path / "pretrain_own.py").write_text("def (")
    assert check_script.main([str(path)]) == 1


@pytest.mark.parametrize("flag", ["--mtp-use-repeated-layer", "--bert-no-binary-head"])
def test_a_refused_flag_of_megatron_is_no_flag_of_the_script(tmp_path, flag):
    assert check_script.main([str(launch(tmp_path, flag))]) == 1


def test_notes_are_shown(tmp_path, capsys):
    words = ["--recompute-activations", "--recompute-modules", "layernorm", "core_attn"]
    assert check_script.main([str(launch(tmp_path, *words, program="pretrain_gpt.py"))]) == 0
    notes = sections(capsys.readouterr().out)["notes"]
    assert "--recompute-modules layernorm:" in notes


LAUNCH = "\ntorchrun pretrain_gpt.py "
ENDLESS = {
    "run.sh": f"[[ {'a' * 40}! =~ ^(a+)+$ ]]{LAUNCH}",
    "more.sh": "a=('' '')\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40 + LAUNCH,
    "cut.sh": f"a={'x' * 100_000}\n" + "echo ${a%%*y*z}\n" * 50 + LAUNCH,
    "nested.sh": "a=(" * 40_000,
    "words.sh": f"{LAUNCH} {'--x 1 ' * 8000}",
    "script.py": "x = " + "(" * 3000,
    "none.sh": "echo",
    "none.py": "print()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_script_without_an_end_is_one_error_soon(name, tmp_path, capsys, monkeypatch):
    assert check_script.MAX_SECONDS <= 1
    monkeypatch.setattr(check_script, "MAX_SECONDS", 0.25)
    (tmp_path / name).write_text(ENDLESS[name])
    before = time.process_time()
    assert check_script.main([str(tmp_path / name)]) == 1
    assert time.process_time() - before < 0.75  # 0.25 on an idle machine
    out, err = capsys.readouterr()
    code = "no-launch-found" if name[:4] == "none" else "script-not-followed"
    assert out == "" and err.count("\n") == 1
    assert_reported(err, code, name)
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_escapes_of_a_script_do_not_reach_the_terminal(tmp_path, capsys):
    path = launch(tmp_path, "--bad-\x1b[2J", "--seed", "\x1b]0;x\x07", program="pretrain_gpt.py")
    assert check_script.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "--bad-" in said and not {"\x1b", "\x07"} & set(said)


def test_a_file_outside_of_the_script_s_folder_is_not_read(tmp_path, capsys):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (tmp_path / "scripts" / "in.args").write_text("--seed 1 @../passwd")
    (tmp_path / "scripts" / "link.args").symlink_to(tmp_path / "passwd")
    folder = os.path.relpath(tmp_path / "scripts")
    for word in (f"@{tmp_path}/passwd", f"@{folder}/in.args", f"@{folder}/link.args"):
        path = launch(tmp_path / "scripts", "--data-path", word, program="pretrain_gpt.py")
        assert check_script.main([str(path)]) == 1
        out, err = capsys.readouterr()
        assert_reported(err, "args-file-outside", "passwd" if "link" not in word else "link.args")
        assert "root:" not in out + err


def test_the_types_of_rotary_positions(tmp_path):
    for value, code in (("yarn", 0), ("rope", 0), ("su", 1)):
        path = launch(tmp_path, "--rope-type", value, program="pretrain_gpt.py")
        assert check_script.main([str(path)]) == code
