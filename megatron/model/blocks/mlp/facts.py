"""A dense MLP, plain or gated: its sizes, parameters, memory, traffic, and what it refuses."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.model_flags import ModelFlags
from megatron.config.plan.parameter_spec import LayerScheme, ParameterSpec, column, row
from megatron.config.plan.transfer import (
    Traffic,
    column_to_row_backward,
    gathered_input,
    summed_result,
)
from megatron.model.blocks.block import Block, Rules, Sizes, fit


def matrices(model: ModelFlags, prefix: str, width: int, draw: LayerScheme) -> list[ParameterSpec]:
    """The two of an MLP of this width, with their biases."""
    h = model.hidden_size
    up = (2, width, h) if model.gated else (width, h)
    return [
        *column(prefix + "linear_fc1", up, model.mlp_bias, draw("mlp_in")),
        *row(prefix + "linear_fc2", (h, width), model.mlp_bias, draw("mlp_out")),
    ]


def fuses_swiglu(sizes: Sizes) -> bool:
    """Is SwiGLU one kernel, which keeps its input alone?"""
    return not sizes.config.precision.fp64 and sizes.config.kernels.bias_swiglu_fusion


def activation_bytes(sizes: Sizes, width: int) -> int:
    """Of an MLP of this width and one token: input (or slope) and result of the activation
    function, and what a gated one keeps between."""
    # geglu's C++ keeps GELU's input in bf16; elsewhere on a CPU the slope is kept beside it.
    widths = {
        "swiglu": 3 if fuses_swiglu(sizes) or sizes.config.model.changed_glu else 4,
        "quick_geglu": 3,
        "geglu": 5 if sizes.on_cpu and not (sizes.native and sizes.itemsize == 2) else 4,
    }.get(sizes.config.model.activation, 2)
    return sizes.itemsize * widths * width


@dataclass(frozen=True)
class DenseMLP(Block):
    """An MLP that computes every token."""

    scope = "mlp"
    recomputed_as = "mlp"

    @property
    def text(self) -> str:
        """Its width."""
        return f"FFN {self.model.ffn}"

    def refuses(self, f: Rules) -> Iterator[str]:
        """A width of 0, and one that tensor-parallel ranks cannot share."""
        if not f.ok("hidden_size") or f.bad & {"ffn_hidden_size", "ffn_multiple_of"}:
            return
        ffn = self.model.ffn
        if ffn < 1:
            yield (
                f"--ffn-hidden-size is missing: 8/3 x {f.say('hidden_size')} rounded down to a "
                "multiple of 64 is 0; give it [flag-missing]"
            )
        elif f.ok("tensor_model_parallel_size", "num_attention_heads"):
            tp = f["tensor_model_parallel_size"]
            if ffn % tp:
                yield (
                    f"{f.say('tensor_model_parallel_size')}: the MLP width {ffn} is not a multiple "
                    f"of it; {fit(math.gcd(ffn, f['num_attention_heads']))}, or give "
                    f"--ffn-hidden-size {(ffn // tp + 1) * tp} "
                    "[tensor-parallel-does-not-divide-mlp]"
                )

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """Its width."""
        if self.model.ffn % tp:
            yield "MLP hidden size", self.model.ffn

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """Its width."""
        split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
        yield self.model.ffn // tp, f"the width of a rank's MLP{split}", "change --ffn-hidden-size"

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Two matrices, and xIELU's two scalars."""
        table = matrices(self.model, prefix, self.model.ffn, draw)
        if self.model.xielu:
            # Softplus of the two is 0.8 and 0.3 at first; each rank sees its part of the MLP.
            for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3)):
                std = math.log(math.expm1(value))
                table.append(
                    ParameterSpec(
                        f"{prefix}xielu.{name}", (1,), init="constant", std=std, partial=("tp",)
                    )
                )
        return table

    def saved(self, sizes: Sizes) -> int:
        """Input and result of the activation function."""
        return sizes.tokens * activation_bytes(sizes, self.model.ffn // sizes.tp)

    def backward(self, sizes: Sizes) -> int:
        """Of its first matrix, or of its second, whose inputs and outputs change places."""
        ffn = self.model.ffn // sizes.tp
        inner = ffn * (2 if self.model.gated else 1)
        first = sizes.linear_backward(inner, sizes.hidden)
        first += sizes.tokens * (sizes.itemsize * inner - activation_bytes(sizes, ffn))
        second = sizes.linear_backward(ffn, sizes.hidden)
        second += sizes.tokens * sizes.itemsize * (ffn - sizes.hidden)
        return max(first, second) + sizes.rows * sizes.hidden * sizes.itemsize

    def traffic(self, sizes: Sizes) -> Traffic:
        """Its two linear layers."""
        first = gathered_input(sizes)
        forward = [*first, *summed_result(sizes)]
        return Traffic(forward, column_to_row_backward(sizes), first, [])
