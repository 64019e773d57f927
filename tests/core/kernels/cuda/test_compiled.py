"""The Triton kernels as they are compiled for GPUs, which needs no GPU: how wide they load, and how
many instructions they have."""

import re

import pytest

pytestmark = pytest.mark.peers
ROW = {"columns": "*i64", "width": "i32", "valid": "i32"}
SHAPE = {"width": "i32"}
WEIGHTS = {"weights": "*fp32", "of_weights": "*fp32"}
GROUPED = {"total": "*fp32", "ends": "*i32", "outputs": "i32", "inputs": "i32"}
STEPS = dict.fromkeys(
    "lines batch step_s step_b step_n out_s out_b out_n table_s table_b".split(), "i32"
)
ROTATE = STEPS | {"cos": "*fp32", "sin": "*fp32", "sign": "fp32"}
DROP = {"total": "i32", "p": "fp32", "scale": "fp32", "seed": "i64"}
NORM = dict.fromkeys(("means", "scales", "sums"), "*fp32") | dict.fromkeys(
    ("rows", "width", "steps"), "i32"
)
HEADS = {"HEADS": 16, "DIM": 128, "INTERLEAVED": False, "LINES": 16}
# Arguments that are not tensors of the dtype; constants; the most instructions for bf16.
KERNELS = {
    "swiglu": (SHAPE, {"weights": None, "BLOCK": 1024}, 200),
    "swiglu, weighted": (SHAPE | WEIGHTS, {"BLOCK": 1024}, 200),
    "swiglu_backward": (SHAPE | WEIGHTS, {"weights": None, "BLOCK": 1024}, 280),
    "swiglu_backward, weighted": (SHAPE | WEIGHTS, {"BLOCK": 1024}, 300),
    "sum_rows": ({"places": "*i64", "width": "i32"}, {"COPIES": 8, "BLOCK": 1024}, 320),
    "add_grouped_product, first": (GROUPED, {"ADD": False, "M": 128, "N": 256, "K": 64}, 2000),
    "add_grouped_product": (GROUPED, {"ADD": True, "M": 128, "N": 256, "K": 64}, 2000),
    "rotate": (ROTATE, HEADS | {"HALF": 64, "WIDTH": 64, "REST": 0}, 230),
    "rotate, interleaved": (
        ROTATE,
        HEADS | {"INTERLEAVED": True, "HALF": 64, "WIDTH": 64, "REST": 0},
        240,
    ),
    "rotate, nothing": (ROTATE, HEADS | {"HALF": 0, "WIDTH": 1, "REST": 128}, 100),
    "drop": (DROP, {"LOAD": False, "ADD": False, "WIDE": True, "BLOCK": 1024}, 850),
    "drop, added": (DROP, {"LOAD": False, "ADD": True, "WIDE": True, "BLOCK": 1024}, 850),
    "drop, seed loaded": (
        DROP | {"seed": "*i64"},
        {"LOAD": True, "ADD": True, "WIDE": True, "BLOCK": 1024},
        850,
    ),
    "norm_backward": (NORM, {"CENTERED": True, "ROWS": 4, "BLOCK": 1024}, 1100),
    "norm_backward, RMS": (NORM, {"CENTERED": False, "ROWS": 4, "BLOCK": 1024}, 750),
    "column_sums": (NORM, {"ROWS": 16, "BLOCK": 256}, 400),
    "row_losses": (
        ROW | {"loss": "*fp32", "sums": "*fp32", "rows": "i32", "smoothing": "fp32"},
        {"VECTOR": 8, "BLOCK": 4096},
        600,
    ),
    "loss_grad": (
        ROW
        | dict.fromkeys(("largest", "logs", "grads", "hits"), "*fp32")
        | {"share": "fp32", "uniform": "fp32"},
        {"BLOCK": 4096},
        450,
    ),
}


@pytest.mark.parametrize(
    "capability",
    [90, pytest.param(100, marks=pytest.mark.campaign), pytest.param(80, marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile(name, capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.kernels.cuda import triton_kernels

    kernel = getattr(triton_kernels, f"_{name.partition(',')[0]}_kernel")
    others, constants, most = KERNELS[name]
    names = kernel.arg_names
    types = {one: others.get(one, "*bf16") for one in names} | dict.fromkeys(constants, "constexpr")
    # as for tensors of torch, and widths that are divisible by 16; a vocabulary need not be
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, one in enumerate(names)
        if types[one][0] in "*i" and one not in ("valid", "seed", "lines", "batch", "rows", "steps")
    }
    source = ASTSource(
        kernel, types, {(names.index(one),): value for one, value in constants.items()}, divisible
    )
    ptx = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8 if "loss" in name or "product" in name else 4},
    ).asm["ptx"]
    assert len(re.findall(r";$", ptx, re.M)) < most
    wide = r"\.global\S*\.(v4\.b32|v2\.b64)"
    assert re.search(rf"ld{wide}|cp\.async\.cg\.shared\.global .*, 0x10", ptx)
    if "product" in name:  # by the tensor cores, which read transposed rows
        assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in ptx
    if "drop" in name:  # of Philox: two instructions for a product would take a third longer
        assert "mul.wide.u32" in ptx and "mul.hi.u32" not in ptx
    if "rotate" in name:  # all are wide; GPUs divide 64-bit integers by some 70 instructions
        assert not re.search(r"(div|rem)\.[su]64", ptx)
        assert all(re.match(wide, each) for each in re.findall(r"(?:ld|st)(\.global\S*)", ptx))
