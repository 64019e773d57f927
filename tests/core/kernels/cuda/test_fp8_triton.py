"""How the Triton kernels of FP8 are compiled for GPUs, of which none is needed; what they compute: interpreted.py."""

import re

import pytest

FORMATS = ("fp8e4nv", "fp8e5")


@pytest.mark.peers
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ["amax", "scale", *FORMATS])
def test_the_kernels_compile(name, capability):
    """Numbers are rounded by the format's instruction; loads and both stores have 16 bytes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.kernels.cuda import fp8_triton as kernels

    pointers = dict.fromkeys("amax scale fixed out inverse".split(), "*fp32") | {"x": "*bf16"}
    others = pointers | dict.fromkeys(("largest", "most", "limit"), "fp32")
    kernel, constants = {
        "amax": (kernels._amax_kernel, {"BLOCK": kernels.BLOCK, "STEPS": kernels.STEPS}),
        "scale": (kernels._scale_kernel, {"FIXED": False}),
    }.get(name, (kernels._cast_kernel, {"ROWS": True, "COLUMNS": True, "T": kernels.TILE}))
    if name == "amax":
        others["amax"] = "*i32"
    others |= {"rows": f"*{name}", "columns": f"*{name}"}
    names = kernel.arg_names
    types = {one: others.get(one, "i32") for one in names} | dict.fromkeys(constants, "constexpr")
    divisible = {
        (i,): [["tt.divisibility", 16]] for i, one in enumerate(names) if types[one][0] in "*i"
    }
    source = ASTSource(
        kernel, types, {(names.index(one),): value for one, value in constants.items()}, divisible
    )
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"]
    if name == "scale":
        assert "div.rn.f32" in ptx
        return
    assert "ld.global.v4.b32" in ptx
    if name != "amax":
        assert "max.NaN.f32" in ptx or "min.NaN" in ptx
        assert ("e4m3x2" if name == "fp8e4nv" else "e5m2x2") + ".f32" in ptx
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
