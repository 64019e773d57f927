"""Rules of Muon."""

from collections.abc import Iterator

from megatron.config.checks.facts import Facts
from megatron.config.muon import COEFFICIENTS


def rule(f: Facts) -> Iterator[str]:
    """One line for each rule that these flags break."""
    if f["muon_tp_mode"] == "blockwise":
        yield (
            f"{f.say('muon_tp_mode')}: would orthogonalize each rank's part by itself, another "
            "model for every tensor-parallel size; omit it [muon-blockwise]"
        )
    if f["use_mup"] and f["muon_scale_mode"] == "spectral":
        yield (
            "--muon-scale-mode spectral: Muon's updates would grow with the width, against "
            "--use-mup; use unit_rms_norm [mup-muon-spectral]"
        )
    kind = f["muon_coefficient_type"]
    steps = len(COEFFICIENTS[kind])
    if f.ok("muon_num_ns_steps") and f["muon_num_ns_steps"] % steps:
        yield (
            f"{f.say('muon_num_ns_steps')}: not a multiple of the {steps} steps of "
            f"--muon-coefficient-type {kind}; use one, or --muon-coefficient-type simple "
            "[muon-steps-not-whole]"
        )
    if f["zero_partition"] != "even":
        yield (
            f"{f.say('zero_partition')} and --optimizer muon: Muon gives whole matrices to ranks "
            "by itself; omit --zero-partition [flags-exclude-each-other]"
        )
    if f["ddp_reduce_scatter_with_fp32_accumulation"]:
        yield (
            f"{f.say('ddp_reduce_scatter_with_fp32_accumulation')} and --optimizer muon: gradients "
            "of matrices are summed by a reduction to their owner; omit the first "
            "[flags-exclude-each-other]"
        )
