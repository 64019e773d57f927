"""Flags of Muon, which weights it updates, and the matrices that these are."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg

_MUON = ("optimizer", "muon")
_muon = functools.partial(arg, requires=_MUON)
# (a, b, c) of X <- a X + (b G + c G^2) X with G = X X^T, in turn, repeated from the first
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon, for the matrices of the layers."""

    muon_momentum: float = _muon(0.9, minimum=0, below=1)
    """decay of Muon's momentum; Megatron-LM's OptimizerConfig and torch have 0.95"""

    muon_use_nesterov: bool = _muon(False, alias=("--muon-nesterov",))
    """Nesterov momentum: orthogonalize (1 - m) gradient + m momentum"""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = _muon("spectral")
    """factor of the update of an [out, in] matrix: spectral sqrt(max(out, in)), unit_rms_norm
    sqrt(out / in), shape_scaling sqrt(max(1, out / in))"""

    muon_extra_scale_factor: float = _muon(1.0, above=0)
    """another factor of Muon's update; 0.2 with spectral gives updates as large as Adam's"""

    muon_coefficient_type: Literal["quintic", "simple"] = _muon("quintic")
    """coefficients of the Newton-Schulz steps: simple (the same in each) or quintic (five, in
    turn)"""

    muon_num_ns_steps: int = _muon(5, minimum=1, maximum=99)
    """Newton-Schulz steps of an update"""

    muon_split_qkv: bool = _muon(True, off="--muon-no-split-qkv")
    """orthogonalize the weights of queries, keys and values as one matrix"""

    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] | None = _muon(None)
    """precision of the Newton-Schulz steps: medium (bf16), or high and highest (the dtype of the
    main weights) (default: medium on CUDA with fp32 main weights, else highest)"""

    muon_neuron_beta2: float | None = _muon(None, minimum=0, below=1)
    """NorMuon, with this decay of its second moment: each row of an orthogonalized [out, in], if in
    > out each column, is divided by its root mean square (default: plain Muon)"""

    muon_tp_mode: Literal["duplicated", "distributed", "auto", "blockwise"] = _muon("duplicated")
    """tensor-parallel ranks gather each matrix and orthogonalize it whole, whichever is given;
    blockwise would train another model in each layout and is refused"""

    @property
    def states(self) -> int:
        """Tensors that a weight keeps beside it, each gathered where the matrix is: the momentum,
        and NorMuon's second moment."""
        return 1 if self.muon_neuron_beta2 is None else 2

    @property
    def spelled(self) -> str:
        """The flags that say what state its weights have."""
        return f"--optimizer muon{' --muon-neuron-beta2' * (self.states > 1)}"

    def text(self, precision: str) -> str:
        """Its name and constants; `precision` is that of Newton-Schulz."""
        name, neurons = "Muon", ""
        if self.muon_neuron_beta2 is not None:
            name, neurons = "NorMuon", f", beta of neurons {self.muon_neuron_beta2:g}"
        return (
            f"{name} (momentum {self.muon_momentum:g}, "
            f"{'' if self.muon_use_nesterov else 'no '}Nesterov, {self.muon_num_ns_steps} "
            f"Newton-Schulz steps ({self.muon_coefficient_type}) in {precision}, scale "
            f"{self.muon_scale_mode} x {self.muon_extra_scale_factor:g}{neurons})"
        )
