"""Cross entropy on CUDA, one kernel of Triton each way: `row_losses` and `loss_grad` of
`cpu.native` as operations of torch, which a trace on the meta device counts as one launch each."""

import torch

LIBRARY = torch.library.Library("megatron", "FRAGMENT")
LIBRARY.define(
    "row_losses(Tensor logits, Tensor columns, int valid, float smoothing) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "loss_grad_(Tensor(a!) logits, int valid, Tensor largest, Tensor logs, Tensor columns, "
    "Tensor grads, Tensor hits, float share, float uniform) -> Tensor(a!)"
)
LIBRARY.impl(
    "row_losses",
    lambda logits, *_: (
        logits.new_empty(len(logits), dtype=torch.float32),
        logits.new_empty(4, len(logits), dtype=torch.float32),
    ),
    "Meta",
)
LIBRARY.impl("loss_grad_", lambda logits, *_: logits, "Meta")

row_losses = torch.ops.megatron.row_losses
loss_grad = torch.ops.megatron.loss_grad_
