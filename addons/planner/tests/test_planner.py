"""tools/plan.py: predicted steps against those measured on an H200, the schedule's bubble, layouts
that are searched, tables of measured runs, and bad input."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.planner import evaluate, nanotron, points, search
from megatron.addons.planner.fit import fit
from megatron.addons.planner.machines import Constants, load, names
from megatron.addons.planner.run_sizes import sizes
from megatron.addons.planner.step_time import Runs, collective, flops, parameters, step_seconds
from megatron.config.command_line import planned
from megatron.config.plan.plan import make_plan
from megatron.config.plan.schedules import bubble_fraction
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_reported, numbers

# One H200, eager, bf16, mock data, 2026-11-28: model, micro-batches, milliseconds of a step.
H200 = {
    "GPT-2 124M": ("12 768 12 12 3072 50304 1024 --micro-batch-size 32", 4, 262.9),
    "Llama 1B": ("16 2048 16 16 5632 32000 2048 --swiglu --micro-batch-size 8", 2, 364.7),
    "4 groups": ("16 2048 16 4 5632 32000 4096 --swiglu --micro-batch-size 4", 2, 355.0),
    "launches": ("12 768 12 12 3072 50304 1024 --micro-batch-size 2", 16, 678.5),
    "GPT 1.3B": ("24 2048 16 16 8192 50304 1024 --micro-batch-size 8", 4, 508.1),
    "GPT-2 1.5B": ("48 1600 25 25 6400 50304 1024 --micro-batch-size 16", 2, 668.7),
    "Llama 3B": ("28 3072 24 8 8192 128256 4096 --swiglu --micro-batch-size 2", 4, 1310.2),
    "Llama 7B": ("32 4096 32 32 11008 32000 4096 --swiglu --micro-batch-size 1", 2, 697.2),
}
TITLES = (
    "source model gpu layers hidden heads kv_heads head_dim ffn glu vocab experts seq gbs_seqs mbs "
    "tp pp vpp dp gpus zero_fsdp recompute precision step_s notes"
).split()


def words(model: str, micro_batches: int = 1, ranks: int = 1) -> list[str]:
    layers, hidden, heads, groups, ffn, vocab, seq, *others = model.split()
    batch = int(others[-1]) * micro_batches * ranks
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--group-query-attention --num-query-groups {groups} --ffn-hidden-size {ffn} "
        f"--vocab-size {vocab} --tokenizer-type NullTokenizer --seq-length {seq} --mock-data "
        f"--max-position-embeddings {seq} --global-batch-size {batch} --train-iters 1 --lr 1e-4 "
        f"--bf16 --device cuda {' '.join(others)}"
    ).split()


def run_of(line, gpus: int = 1, gpu: str = "h200") -> Runs:
    plan = make_plan(line.config, gpus, line.config.data.vocab_size)
    return sizes(line.config, plan, load(gpu))


def seconds(run: Runs, gpu: str = "h200") -> float:
    return float(sum(step_seconds(load(gpu).constants, run).values()))


@pytest.fixture
def plan(capsys):
    """Call tools/plan.py; returns (exit code, stdout, stderr)."""
    tool = load_tool("plan")

    def call(*argv: object) -> tuple[int, str, str]:
        from megatron.addons.planner import program

        assert tool is not None
        code = exit_code(program.main, *argv)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("model", H200)
def test_steps_measured_on_an_h200(model):
    flags, micro_batches, milliseconds = H200[model]
    line, problems = planned(words(flags, micro_batches), 1)
    assert problems == []
    assert seconds(run_of(line)) * 1000 == pytest.approx(milliseconds, rel=0.05)


def test_parameters_and_flops_are_those_of_the_plan():
    plain = "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope".split()
    line, _ = planned([*words(H200["Llama 3B"][0]), *plain], 1)
    made = make_plan(line.config, 1, 128256)
    run = run_of(line)
    dense, experts, embedding = parameters(run)
    norms = (2 * 28 + 1) * 3072
    tied = line.config.model.tied
    assert dense + (1 if tied else 2) * embedding + norms == made.num_parameters and experts == 0
    matrices = (dense + embedding) * 6
    assert flops(run, causal=False) / run.batch / run.seq == pytest.approx(
        matrices + 12 * 28 * 4096 * 3072
    )


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(4, 1, 8), (8, 2, 16), (2, 4, 6)])
def test_the_bubble_is_the_schedules(stages, chunks, micro_batches):
    line, _ = planned(words(H200["Llama 1B"][0], micro_batches), 1)
    run = replace(run_of(line), pp=stages, vpp=chunks, vocab=1)
    kinds = step_seconds(load("h100").constants, run)
    busy = sum(float(kinds[kind]) for kind in kinds) - float(kinds["bubble"])
    busy -= float(kinds["optimizer"])
    share = float(kinds["bubble"]) / busy
    assert share == pytest.approx(bubble_fraction(stages, micro_batches, chunks), rel=0.01)


def test_what_leaves_a_node_goes_over_its_network():
    m = load("h100").constants
    run = Runs(
        **dict.fromkeys(
            "layers hidden heads groups head_dim value_dim ffn gated vocab seq keys batch micro".split(),
            1,
        )
    )
    inside = float(collective(m, run, 8, 1, 1e9))
    near = float(collective(m, run, 16, 1, 1e9))  # 8 of each node share the ring
    far = float(collective(m, run, 16, 8, 1e9))  # one of each node
    start = 3 * m["alpha_near"]
    assert inside == pytest.approx(1e9 * 7 / 8 / (450e9 * m["nvlink"]) + start, rel=1e-6)
    assert far - near == pytest.approx(1e9 * 15 / 16 * (1 / (50e9 * m["net"])), rel=0.3)
    assert float(collective(m, run, 1, 1, 1e9)) == 0


def test_least_squares_find_what_made_the_data():
    x = np.linspace(1, 5, 40)
    truth = np.array([0.3, -0.7])
    measured = np.exp(truth[0] + truth[1] * x)
    measured[3] *= 5  # an outlier, which does not count with its square
    guess = fit(lambda q: q[0] + q[1] * x, measured, np.zeros(2), np.full(2, 10.0))
    assert guess == pytest.approx(truth, abs=0.02)


def rows(tmp_path: Path, count: int = 12, factor: float = 1.3) -> str:
    """A table of runs of one system whose steps are the prediction times a factor."""
    base = dict.fromkeys(TITLES, "") | {
        "source": "made",
        "model": "m",
        "gpu": "H100",
        "layers": "24",
        "hidden": "2048",
        "heads": "16",
        "kv_heads": "16",
        "head_dim": "128",
        "ffn": "8192",
        "glu": "0",
        "vocab": "50304",
        "seq": "2048",
        "gbs_seqs": "256",
        "gpus": "64",
        "vpp": "1",
        "zero_fsdp": "zero1",
        "recompute": "none",
        "precision": "bf16",
        "step_s": "1",
    }
    table = []
    for number in range(count):
        tp, pp = 2 ** (number % 3), 2 ** (number // 3 % 2)
        micro = 2 ** (number // 6)
        table.append(
            base | {"tp": str(tp), "pp": str(pp), "dp": str(64 // tp // pp), "mbs": str(micro)}
        )
    predicted = evaluate.predict(table)
    for row, step in zip(table, predicted, strict=True):
        row["step_s"] = f"{step * factor:.6f}"
    table[0]["gpu"] = "Z80"
    path = tmp_path / "points.tsv"
    path.write_text("\n".join("\t".join(row) for row in [TITLES, *(r.values() for r in table)]))
    return str(path)


def test_a_table_of_runs_is_judged(plan, tmp_path):
    code, out, err = plan("--evaluate", rows(tmp_path), "--plot", tmp_path / "errors.png")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("1 ")  # of a machine without a file
    before, after = (numbers(line) for line in lines if "90th" in line)
    assert before[1] == pytest.approx(23.1, abs=0.1)
    # 1.3 ** (10 / 15): ten others, held by five
    assert after[0] == pytest.approx(8.4, abs=0.1)
    assert (tmp_path / "errors.png").read_bytes()[:4] == b"\x89PNG"
    regrets = [numbers(line) for line in lines if line.startswith("regret of")]
    assert regrets[0][:2] == [0, 0] and regrets[1][1] >= 0 and len(regrets) == 4


ULTRA = {  # layers, hidden, MLP, tied
    "1B": (16, 2048, 8192, 1),
    "3B": (28, 3072, 8192, 1),
    "8B": (32, 4096, 14336, 0),
    "80B": (80, 8192, 28672, 0),
}
# nanotron's runs on H100, published: model, then tensor, pipeline and data parallel ranks, samples
# of a micro-batch, ZeRO stage, GiB at most, and of its two programs that which the step tells.
NANOTRON = [
    ("1B", (1, 1, 16, 1, 1), 24.0, "later"),
    ("3B", (1, 2, 8, 1, 0), 59.6, "later"),
    ("3B", (1, 4, 32, 1, 1), 27.7, "later"),
    ("3B", (1, 16, 4, 4, 1), 70.8, "later"),
    ("8B", (4, 32, 4, 1, 1), 15.6, "later"),
    ("3B", (32, 1, 1, 64, 0), 46.0, "later"),
    ("1B", (1, 4, 32, 2, 1), 25.5, "later"),  # whose first stage has one layer more
    ("1B", (4, 1, 4, 16, 0), 67.0, "earlier"),
    ("3B", (16, 1, 8, 8, 0), 25.0, "earlier"),
    ("3B", (16, 4, 1, 16, 0), 30.5, "earlier"),
    ("8B", (8, 8, 2, 8, 1), 45.7, "earlier"),
    ("3B", (4, 2, 8, 8, 1), 47.2, "earlier"),  # on two stages the device is busy
    ("8B", (8, 2, 8, 4, 1), 20.1, "earlier"),  # ... and waits for its host
]


def nanotron_row(model, layout, gib):
    layers, hidden, ffn, tied = model
    tp, pp, dp, micro, zero = layout
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "tied": tied, "heads": 32, "glu": 1}
    sizes |= {"kv_heads": 32, "head_dim": hidden // 32, "vocab": 131072, "seq": 4096}
    sizes |= {"gbs_seqs": 256, "tp": tp, "pp": pp, "dp": dp, "mbs": micro, "gpus": tp * pp * dp}
    row = dict.fromkeys(TITLES, "") | {name: str(size) for name, size in sizes.items()}
    said = {
        "source": "nanotron/ultrascale",
        "gpu": "H100",
        "zero_fsdp": f"zero{zero}",
        "peak_mem_GB": gib,
    }
    return row | {name: str(value) for name, value in said.items()}


@pytest.mark.parametrize("model, layout, gib, program", NANOTRON)
def test_memory_of_nanotrons_runs(model, layout, gib, program):
    both = nanotron.held(points.runs([nanotron_row(ULTRA[model], layout, gib)]))
    assert getattr(both, program)[0] / 2**30 == pytest.approx(gib, rel=0.07)


@pytest.mark.parametrize(
    "model, layout, measured",
    [
        ("3B", (8, 8, 8, 1, 1), 41.8),
        ("8B", (16, 16, 2, 1, 1), 170.7),
        ("8B", (2, 32, 8, 1, 1), 52.5),
        ("80B", (8, 2, 16, 2, 1), 14.6),
        ("80B", (16, 4, 4, 4, 1), 37.2),
        ("80B", (16, 1, 4, 2, 1), 121.4),  # without stages its layers alone are slower
    ],
)
def test_steps_of_a_program_that_sleeps_between_messages(model, layout, measured):
    """The earlier program's would be 1.5 to 43 times as fast."""
    run = points.runs([nanotron_row(ULTRA[model], layout, 1)])
    machine = load("h100").constants
    slow, fast = (
        sum(step_seconds(machine, replace(run, polls=wait)).values())[0] for wait in (0.2, 0.0)
    )
    assert slow == pytest.approx(measured, rel=0.12)
    assert slow > 1.5 * fast


def test_which_of_nanotrons_programs_a_run_had():
    """The later one's are what the other cannot hold, wide stages, and those of many GPUs."""
    told = {
        ("3B", (1, 4, 16, 4, 1)): (True, True),  # 80 GiB
        ("3B", (1, 16, 4, 1, 1)): (False, False),
        ("3B", (32, 2, 2, 1, 1)): (True, True),
        ("3B", (32, 1, 4, 1, 1)): (False, False),
        ("3B", (32, 1, 16, 1, 1)): (False, False),
        ("3B", (8, 4, 16, 1, 1)): (False, True),  # 512 GPUs
        ("3B", (8, 1, 64, 1, 1)): (False, True),
    }
    for (model, layout), expected in told.items():
        run = points.runs([nanotron_row(ULTRA[model], layout, 1)])
        assert (nanotron.later(run)[0], nanotron.likely_later(run)[0]) == expected
        assert run.polls[0] == (nanotron.POLL if expected[0] else 0)


def test_a_runs_step_tells_its_program_and_so_its_memory():
    """Of two runs of one layout the slow one had the later program; where both programs take as
    long, the layout decides."""
    layout = (8, 8, 8, 1, 1)
    rows = [nanotron_row(ULTRA["3B"], layout, 1) | {"step_s": step} for step in ("41.8", "2.5")]
    rows.append(nanotron_row(ULTRA["1B"], (1, 1, 8, 4, 1), 1) | {"step_s": "3.3"})
    held = nanotron.held(points.runs(rows))
    programs = (held.later, held.earlier, held.earlier)
    for number, (row, program) in enumerate(zip(rows, programs, strict=True)):
        row["peak_mem_GB"] = str(program[number] / 2**30)
    told, nearer = evaluate.memory(rows)[-2:]
    assert "100.0% of 3 runs" in told and "100.0% of 3 runs" in nearer
    rows[0]["step_s"] = "2.5"
    assert "66.7% of 3 runs" in evaluate.memory(rows)[-2]


def test_what_advice_costs_if_each_runs_program_is_known():
    """The layout that looks best ran on the program that sleeps; its step says so."""
    shapes = [(tp, pp, 64 // tp // pp) for tp in (1, 2, 4, 8) for pp in (2, 4, 8)]
    rows = [nanotron_row(ULTRA["3B"], (*shape, 1, 1), 1) for shape in shapes]
    runs = points.runs(rows)
    assert not nanotron.likely_later(runs).any()
    slow, fast = (
        sum(step_seconds(load("h100").constants, replace(runs, polls=wait)).values())
        for wait in (nanotron.POLL, 0.0)
    )
    first, second = np.argsort(fast)[:2]
    assert slow[first] > 1.5 * fast[second]
    for number, row in enumerate(rows):
        row["step_s"] = str(slow[number] if number == first else fast[number])
    lines = evaluate.regret(evaluate.compared(rows))
    worst = [numbers(line)[1] for line in lines if line.startswith("regret of")]
    assert worst[0] == pytest.approx(100 * (slow[first] / fast[second] - 1), abs=0.1)
    assert worst[-1] == 0


def test_nanotrons_stages_are_cut_by_products_with_the_head():
    # the head costs as much as 4 layers: 20 / 8 for each of 8 stages
    layers = [
        points.runs([nanotron_row(ULTRA["1B"], (1, pp, 1, 1, 0), 1)]).first_layers[0]
        for pp in (1, 2, 4, 8)
    ]
    assert layers == [16, 10, 5, 3]


def test_the_advice_on_many_nodes_shuns_what_waits_there():
    """On 512 GPUs few messages between stages and shared sums of gradients; on 128 all the same."""
    for count, waits in ((512, True), (128, False)):
        layouts = [(4, 1, 2, 1), (4, 1, 2, 0), (4, 4, 2, 1), (16, 1, 2, 1)]
        rows = [
            nanotron_row(ULTRA["3B"], (tp, pp, count // tp // pp, n, z), 1)
            for tp, pp, n, z in layouts
        ]
        predicted = evaluate.predict(rows)
        found = evaluate.Comparison(rows, predicted, predicted)
        best, *others = evaluate._expected(found) - predicted
        assert all((other > best + 0.5) == waits for other in others)


def metrics_file(tmp_path: Path, batches: list[int], milliseconds) -> str:
    """What a run writes, 6 steps of each batch size; the first three are slow."""
    lines = []
    for number in range(6 * len(batches)):
        batch = batches[number // 6]
        row = {"iteration": number + 1, "lm_loss": 4.6, "grad_norm": 1, "learning_rate": 1e-4}
        row |= {"consumed_samples": 1, "consumed_tokens": 1, "global_batch_size": batch}
        row |= {"elapsed_ms": milliseconds(batch) * (5 if number < 3 else 1)}
        lines.append(json.dumps(row | {"skipped": 0, "skip_reason": None}))
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_runs_log_calibrates_a_machine_for_other_runs(plan, tmp_path):
    """Of a machine 1.7 times as slow as its file says: what the run's own steps and another model
    take is known afterwards."""
    argv = words(H200["GPT-2 124M"][0], 4)
    line, _ = planned(argv, 1)
    other, _ = planned(words(H200["Llama 1B"][0], 2), 1)
    truth = 1.7 * seconds(run_of(line))
    log = metrics_file(tmp_path, [128], lambda batch: 1000 * truth)
    machine = tmp_path / "mine.toml"
    assert seconds(run_of(other)) != pytest.approx(1.7 * seconds(run_of(other)), rel=0.05)
    code, out, err = plan(
        *argv, *"--gpus 1 --gpu h200 --calibrate".split(), log, "--output", machine
    )
    assert code == 0, err
    assert numbers(out.splitlines()[0])[1] == pytest.approx(truth, rel=0.01)
    assert seconds(run_of(line), str(machine)) == pytest.approx(truth, rel=0.01)
    expected = 1.7 * seconds(run_of(other))
    assert seconds(run_of(other), str(machine)) == pytest.approx(expected, rel=0.03)


def test_one_ranks_steps_say_nothing_of_messages(plan, tmp_path):
    """A device twice as fast sends no faster: links stay as the file has them."""
    argv = words(H200["GPT-2 124M"][0], 4)
    line, _ = planned(argv, 1)
    log = metrics_file(tmp_path, [128], lambda batch: 500 * seconds(run_of(line)))
    machine = tmp_path / "mine.toml"
    code, _, err = plan(*argv, *"--gpus 1 --gpu h200 --calibrate".split(), log, "--output", machine)
    assert code == 0, err
    before, after = load("h200").constants, load(str(machine)).constants
    links = ("nvlink", "net", "alpha_near", "alpha_far", "alpha_pipe")
    assert [after[name] for name in links] == pytest.approx([before[n] for n in links], rel=0.01)
    assert after["gemm"] > 1.5 * before["gemm"]


def test_what_tensor_parallel_ranks_send_and_share():
    model, _, _ = H200["Llama 1B"]
    line, _ = planned([*words(model), "--tensor-model-parallel-size", "2"], 2)
    plain = run_of(line, 2)
    assert (plain.sequence, plain.element) == (0, 2)
    constants = load("h200").constants
    kinds = [
        step_seconds(constants, replace(plain, **change))
        for change in ({}, {"sequence": 1}, {"element": 4})
    ]
    passes = [float(each["memory-bound"]) for each in kinds]
    sent = [float(each["tensor parallel"]) for each in kinds]
    assert passes[1] < 0.9 * passes[0] and sent[1] == sent[0]
    assert 1.7 * sent[0] < sent[2] < 2 * sent[0]  # the loss's two are of a number a token


def test_two_batch_sizes_tell_a_steps_fixed_part_apart(plan, tmp_path):
    """Of which the file knows nothing: 2 ms a sample and 0.2 s a step."""
    argv = words(H200["GPT-2 124M"][0], 4)
    log = metrics_file(tmp_path, [32, 64, 128], lambda batch: 2 * batch + 200)
    machine = tmp_path / "mine.toml"
    code, _, err = plan(*argv, *"--gpus 1 --gpu h200 --calibrate".split(), log, "--output", machine)
    assert code == 0, err
    line, _ = planned(argv, 1)
    assert seconds(run_of(line), str(machine)) == pytest.approx(0.456, rel=0.08)
    half = replace(run_of(line), batch=32)
    assert seconds(half, str(machine)) == pytest.approx(0.264, rel=0.08)


def test_published_layouts_are_compared_with_the_search(plan, tmp_path):
    row = nanotron_row((24, 2048, 8192, 1), (2, 1, 4, 1, 1), 1)
    row |= {"source": "NVIDIA/NeMo", "model": "GPT3", "gbs_seqs": "64", "step_s": "1"}
    row |= {"experts": "", "precision": "bf16"}
    table = tmp_path / "points.tsv"
    table.write_text("\n".join("\t".join(line) for line in (row, row.values())))
    code, out, err = plan("--evaluate", table, "--known")
    assert code == 0, err
    published = next(line for line in out.splitlines() if "GPT3" in line)
    assert "--tensor-model-parallel-size 2" in published
    assert numbers(out.splitlines()[-1])[1] == 1


def test_no_row_is_corrected_by_itself():
    table = [{"source": "s", "gpu": "H100"} for _ in range(3)]
    found = evaluate.Comparison(table, np.ones(3), np.array([1.0, 1.0, 9.0]))
    assert evaluate.factors(found)[2] == 1
    alone = evaluate.Comparison(table[:1], np.ones(1), np.array([9.0]))
    assert evaluate.factors(alone) == 1


def test_constants_come_back_from_steps_that_they_made(tmp_path):
    table, _ = evaluate.read(rows(tmp_path, 40, factor=1.0))
    constants = Constants(["h100"])
    truth = constants.start.copy()
    truth[0] -= 0.1  # slower GEMMs
    which = np.zeros(len(table), int)
    runs = points.runs(table)
    measured = sum(step_seconds(constants.of(truth, which), runs).values())
    x = constants.fitted(runs, which, measured, which)
    again = sum(step_seconds(constants.of(x, which), runs).values())
    assert again == pytest.approx(measured, rel=0.03)


def test_the_best_layouts_fit_and_are_flags(plan):
    argv = words(H200["Llama 7B"][0], 64)
    code, out, err = plan(*argv, "--gpus", 64, "--gpu", "h100", "--search", "--top", 3)
    assert code == 0, err
    ranked = [line for line in out.splitlines() if line.lstrip()[:2] in ("1.", "2.", "3.")]
    steps = [numbers(line)[1] for line in ranked]
    assert len(ranked) == 3 and steps == sorted(steps)
    flags = ranked[0].split(": ", 1)[1].split()
    line, problems = planned([*program_words(argv), *flags], 64)
    assert problems == []
    assert seconds(run_of(line, 64, "h100"), "h100") == pytest.approx(steps[0], rel=0.001)


def program_words(argv: list[str]) -> list[str]:
    from megatron.addons.planner.program import _without_layout

    return _without_layout(argv)


def test_the_search_passes_over_no_layout():
    """Of a small cell, against all products of sizes that the rules of flags take."""
    argv = program_words(words("4 256 4 4 512 512 512 --micro-batch-size 1", 8))
    line, _ = planned([*argv, "--micro-batch-size", "1"], 8)
    run = run_of(line, 8, "h100")
    table = search.layouts(run, 8)
    listed = set(
        zip(*(np.asarray(getattr(table, n)).tolist() for n in ("tp", "pp", "micro")), strict=True)
    )
    wanted = set()
    for tp, pp, micro in (
        (a, b, c) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) for c in (1, 2, 4, 8)
    ):
        if tp * pp <= 8:
            flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
            flags += f"--micro-batch-size {micro}"
            if not planned([*argv, *flags.split()], 8)[1]:
                wanted.add((tp, pp, micro))
    assert listed == wanted


def test_ends_that_count_as_layers_are_searched_and_hide_the_head():
    argv = program_words(words("6 256 4 4 512 32000 512 --micro-batch-size 1", 8))
    line, _ = planned([*argv, "--micro-batch-size", "1"], 4)
    table = search.layouts(run_of(line, 4, "h100"), 4)
    which = np.flatnonzero((np.asarray(table.pp) == 4) & (np.asarray(table.balanced) == 3))
    assert len(which)
    layout = {name: int(np.asarray(getattr(table, name))[which[0]]) for name in search.AXES}
    tried, problems = planned([*argv, *search.flags_of(layout)], 4)
    assert problems == [] and layout["vpp"] == 1
    made = make_plan(tried.config, 4, 32000)
    assert [len(chunk) for stage in made.layers_per_stage for chunk in stage] == [1, 2, 2, 1]
    run = run_of(tried, 4, "h100")
    assert (run.balanced, run.of_stage) == (3, 2)
    constants = load("h100").constants
    with_head, without = (
        float(step_seconds(constants, each)["head and loss"])
        for each in (replace(run, balanced=0), run)
    )
    assert with_head > 0 and without < 0.5 * with_head


def test_days_price_and_lost_time(plan):
    argv = words(H200["Llama 7B"][0], 64)
    code, out, err = plan(
        *argv, *"--gpus 1 --gpu h200 --tokens 1e9 --mtbf-hours 2 --price 3".split()
    )
    assert code == 0, err
    said = {line.split(":")[0].split(" ")[0]: numbers(line) for line in out.splitlines()}
    rate = said["tokens/s"][0]
    interval = said["failures"][1]
    assert interval == pytest.approx((2 * 30 * 7200) ** 0.5, abs=1)
    lost = 30 / interval + (interval / 2 + 600) / 7200
    days = 1e9 / rate / 86400 / (1 - lost)
    total = next(numbers(line) for line in out.splitlines() if "tokens: " in line)
    assert total[1] == pytest.approx(days, abs=0.01)
    assert total[-1] == pytest.approx(days * 24 * 3, abs=1)


def test_a_run_that_trains_a_part_is_told_what_its_time_is_of(plan):
    argv = [*words(H200["Llama 7B"][0], 8), "--gpus", "1", "--gpu", "h200"]
    whole, part = (plan(*argv, *more)[1] for more in ([], ["--train-only", "*.mlp.*"]))
    assert "--train-only" in part and "--train-only" not in whole
    assert numbers(part.splitlines()[0])[0] < numbers(whole.splitlines()[0])[0]  # memory


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--gpus", "0"], "value-out-of-range", "--gpus"),
        ([], "flag-missing", "--gpus"),
        (["--gpus", "1", "--gpu", "z80"], "value-not-a-choice", "--gpu"),
        (["--evaluate", "nowhere.tsv"], "file-not-readable", "nowhere.tsv"),
        (["--gpus", "67", "--search"], "no-layout-fits", "--gpus"),
        (["--gpus", "1", "--calibrate", "no.jsonl"], "flag-missing", "--output"),
        (
            ["--gpus", "1", "--calibrate", "no.jsonl", "--output", "a.toml"],
            "file-not-readable",
            "no.jsonl",
        ),
    ],
)
def test_bad_input(plan, argv, code, named):
    run = words(H200["Llama 7B"][0], 8) if "--gpus" in argv else []
    status, _, err = plan(*run, *argv)
    assert status == 2
    assert_reported(err, code, named)


def test_every_machine_loads_and_says_where_its_figures_come_from():
    assert "h100" in names()
    for name in names():
        assert (
            step_seconds(load(name).constants, run_of(planned(words(H200["GPT-2 124M"][0]), 1)[0]))[
                "GEMM"
            ]
            > 0
        )
    folder = Path(evaluate.FOLDER)
    assert all(path.read_text().startswith("# ") for path in folder.glob("*.toml"))
    assert set(json.loads((folder / "fitted.json").read_text())) >= {"common", "h100", "a100-80gb"}
