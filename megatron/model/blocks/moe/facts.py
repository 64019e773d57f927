"""A mixture of experts: router, experts and shared expert; their sizes, parameters, memory,
traffic, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.plan.parameter_spec import LayerScheme, Matrices, ParameterSpec, drawn
from megatron.config.plan.transfer import (
    Traffic,
    Transfer,
    column_to_row_backward,
    gathered_input,
    summed_result,
)
from megatron.model.blocks.block import Block, Rules, Sizes
from megatron.model.blocks.mlp.facts import (
    activation_bytes,
    fuses_swiglu,
    matrices,
)

EXPERT_BIAS = "router.expert_bias"
NUMBER = 8  # bytes of the number of a copy, of an expert and of a count


@dataclass(frozen=True)
class MixtureOfExperts(Block):
    """The experts that a router selects for each token, and the shared expert."""

    scope = "mlp"
    recomputed_as = "moe"
    made_again = ("moe_act", "shared_experts")

    @property
    def shared(self) -> int:
        """Width of the shared expert; 0 without one."""
        return self.model.moe_shared_expert_intermediate_size or 0

    @property
    def text(self) -> str:
        """Experts, those of a token, and the shared one."""
        m = self.model
        shared = f", shared expert {self.shared}" if self.shared else ""
        return f"{m.num_experts} experts of FFN {m.expert_ffn}, top {m.moe_router_topk}{shared}"

    def refuses(self, f: Rules) -> Iterator[str]:
        """What of experts, routers and parallelism does not fit."""
        from megatron.model.blocks.moe.rules import rule

        yield from rule(f)

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """Widths of an expert and of the shared one."""
        if self.model.expert_ffn % etp:
            yield "expert MLP hidden size", self.model.expert_ffn
        if self.shared % tp:
            yield "shared experts' MLP hidden size", self.shared

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """Widths of an expert and of the shared one."""
        split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
        width = self.model.expert_ffn // etp
        yield width, "a rank's width of an expert", "change --moe-ffn-hidden-size"
        yield (
            self.shared // tp,
            f"a rank's width of the shared expert{split}",
            "change --moe-shared-expert-intermediate-size",
        )

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Router, experts (each matrix of all of them in one tensor, experts first) and the shared
        expert. Each of the expert-tensor-parallel ranks, whose results are added up, has a share of
        the second bias."""
        m = self.model
        router = drawn(draw("router"))
        table = [ParameterSpec(prefix + "router.weight", (m.experts, m.hidden_size), **router)]
        if m.mlp_bias:
            table.append(ParameterSpec(prefix + "router.bias", (m.experts,)))
        if m.moe_router_enable_expert_bias:
            table.append(ParameterSpec(prefix + EXPERT_BIAS, (m.experts,), gradient=False))
        for spec in matrices(m, prefix + "experts.", m.expert_ffn, draw):
            splits = (("ep", 0), *(("etp", dim + 1) for _, dim in spec.splits))
            shape = (m.experts, *spec.shape)
            whole = not spec.splits
            stacked = None if spec.matrices is None else Matrices(True)
            table.append(
                replace(
                    spec,
                    shape=shape,
                    splits=splits,
                    matrices=stacked,
                    partial=("etp",) if whole else (),
                )
            )
        if self.shared:
            table += matrices(m, prefix + "shared_experts.", self.shared, draw)
            if m.moe_shared_expert_gate:
                gate = prefix + "shared_experts.gate_weight"
                table.append(ParameterSpec(gate, (1, m.hidden_size), **router))
        return table

    def _copies(self, sizes: Sizes) -> int:
        """Tokens times their experts; with a capacity at most its share, where the host knows it:
        not in bf16 on a GPU that has all experts."""
        config = sizes.config
        reads = sizes.on_cpu or config.parallel.expert_model_parallel_size > 1
        reads = reads or config.precision.params_dtype != "bfloat16"
        share = min(1.0, reads and self.model.moe_expert_capacity_factor or 1.0)
        # of all experts, as many tokens go to each rank
        return int(sizes.expert_tokens * self.model.moe_router_topk * share)

    def _activation(self, sizes: Sizes) -> int:
        """Bytes of a copy of a token: the results of activation function and probability."""
        m = self.model
        width = m.expert_ffn // sizes.etp
        if "moe_act" in sizes.config.training.recomputed_modules:
            return sizes.itemsize * width * (2 if m.gated else 1)
        return activation_bytes(sizes, width) + sizes.itemsize * width * (not self._fuses(sizes))

    def _fuses(self, sizes: Sizes) -> bool:
        """Are SwiGLU and the probabilities one kernel?"""
        by_kernel = sizes.native or not sizes.on_cpu
        plain = self.model.activation == "swiglu" and not self.model.changed_glu
        return plain and by_kernel and fuses_swiglu(sizes)

    def saved(self, sizes: Sizes) -> int:
        """Of experts: the copies of tokens that they compute (not where the C++ multiplies: in fp32
        on CPUs; in bf16 on some, which is not counted), the activation function's and the
        probability's results, and the order of the copies; of the router: its logits and scores."""
        copied = 0 if sizes.native and sizes.itemsize == 4 else sizes.hidden * sizes.itemsize
        nbytes = self._copies(sizes) * (copied + self._activation(sizes) + 3 * NUMBER)
        nbytes += sizes.rows * self.model.experts * 3 * sizes.wide
        if "shared_experts" not in sizes.config.training.recomputed_modules:
            nbytes += sizes.tokens * activation_bytes(sizes, self.shared // sizes.tp)
            if self.model.moe_shared_expert_gate:  # what the gate is multiplied with
                nbytes += sizes.rows * (sizes.hidden + 1) * sizes.itemsize
        return nbytes

    def backward(self, sizes: Sizes) -> int:
        """Gradients of the activation function, which the probabilities widen, or of the first
        matrix of an expert and of all its inputs."""
        m = self.model
        copies = self._copies(sizes)
        width = m.expert_ffn // sizes.etp
        inner = width * (2 if m.gated else 1)
        matrix = sizes.linear_backward(inner, sizes.hidden) - sizes.linear_backward(0, sizes.hidden)
        gradients = copies * sizes.itemsize * (sizes.hidden + inner)
        wide = sizes.itemsize if self._fuses(sizes) else sizes.wide
        return max(copies * width * 3 * wide, matrix + gradients - copies * self._activation(sizes))

    def traffic(self, sizes: Sizes) -> Traffic:
        """Tokens, probabilities and numbers of experts go to the ranks that share the experts,
        results come back, and the gradients of tokens, probabilities and results; routers count the
        tokens of each expert."""
        there = [*self._router(sizes), *self._to_experts(sizes, backward=False)]
        back = self._from_experts(sizes, backward=False)
        backward = [
            *self._to_experts(sizes, backward=True),
            *self._from_experts(sizes, backward=True),
        ]
        if not self.shared:
            # The results come back from other ranks before the last sum, over tp.
            needed = [t for t in back if t.axis == "ep"] if self.model.sends_to_experts else []
            return Traffic([*there, *back], backward, [*there, *needed], [])
        gate = summed_result(sizes) if self.model.moe_shared_expert_gate else []
        shared_again = [*gathered_input(sizes), *gate]  # its sum only the gate needs
        return Traffic(
            [*there, *back, *gathered_input(sizes), *summed_result(sizes)],
            [*backward, *column_to_row_backward(sizes)],
            [*there, *back, *shared_again],
            shared_again if "shared_experts" in sizes.config.training.recomputed_modules else [],
        )

    def _router(self, sizes: Sizes) -> list[Transfer]:
        """Counts and scores that the routers of a layer exchange."""
        m = self.model
        sent = []
        for kind in m.balancing_losses:
            groups = sizes.config.training.micro_batch_size if kind == "seq_aux_loss" else 1
            counts = Transfer("cp", "all-reduce", 1, groups * m.experts * sizes.wide)
            sent.append(counts)
            if sizes.sequence:
                sent.append(counts._replace(axis="tp"))
            if kind == "global_aux_loss":
                sent.append(counts._replace(axis="dp"))
        selections = m.sinkhorn + bool(m.moe_expert_capacity_factor)
        if selections:
            rows = selections * sizes.tokens * m.experts * sizes.wide
            sent.append(Transfer("cp", "all-gather", selections, sizes.cp * rows))
            sent += [Transfer("tp", "all-gather", selections, rows)] if sizes.sequence else []
        return sent

    def _exchange(self, sizes: Sizes) -> tuple[str, int, int, int]:
        """(Axis of the ranks whose tokens are brought together; bytes of these tokens, of the
        probabilities and of the numbers of their experts)."""
        copies = sizes.expert_tokens * self.model.moe_router_topk
        hidden_bytes = sizes.expert_tokens * sizes.hidden * sizes.itemsize
        axis = "tp" if sizes.etp == sizes.tp else "etp"
        return axis, hidden_bytes, copies * sizes.wide, copies * NUMBER

    def _to_experts(self, sizes: Sizes, backward: bool) -> list[Transfer]:
        """Tokens, probabilities and, in forward, numbers of experts on their way to the experts, or
        the gradients of the first two on their way back.

        All-to-all sends a token once for each of its experts, here as many to each rank.
        """
        m = self.model
        ep = sizes.config.parallel.expert_model_parallel_size
        axis, hidden_bytes, probs, numbers = self._exchange(sizes)
        calls, nbytes = (
            (2, hidden_bytes + probs) if backward else (3, hidden_bytes + probs + numbers)
        )
        operation = "reduce-scatter" if backward else "all-gather"
        if sizes.sequence or sizes.tp == 1:
            sent = [Transfer(axis, operation, calls, nbytes)]
        else:
            sent = [Transfer("tp", "all-reduce", calls, nbytes)] if backward else []
        if not m.sends_to_experts:
            return [*sent, Transfer("ep", operation, calls, ep * nbytes)]
        if not backward:
            sent.append(Transfer("ep", "all-gather", 1, ep * m.experts * NUMBER))
        return [*sent, Transfer("ep", "all-to-all", 2, m.moe_router_topk * hidden_bytes + probs)]

    def _from_experts(self, sizes: Sizes, backward: bool) -> list[Transfer]:
        """The results of experts on their way back, or their gradients."""
        m = self.model
        ep = sizes.config.parallel.expert_model_parallel_size
        axis, hidden_bytes, _, _ = self._exchange(sizes)
        operation = "all-gather" if backward else "reduce-scatter"
        if m.sends_to_experts:
            sent = [Transfer("ep", "all-to-all", 1, m.moe_router_topk * hidden_bytes)]
        else:
            sent = [Transfer("ep", operation, 1, ep * hidden_bytes)]
        if sizes.sequence or sizes.tp == 1:
            return [*sent, Transfer(axis, operation, 1, hidden_bytes)]
        return sent if backward else [*sent, Transfer("tp", "all-reduce", 1, hidden_bytes)]
