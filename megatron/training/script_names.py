"""What scripts import from Megatron besides the loop itself, with its names and arguments: ranks,
the batch of a rank, the configuration and the layers of its GPT.

The suite hands every rank its micro-batch, and the model is that of the flags: so these say what is
there, and refuse what would be something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from megatron.data.script_datasets import OfFlags
from megatron.training.script_args import Arguments, context, get_args

if TYPE_CHECKING:
    import torch

_AXES = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
}


class Mpu:
    """`mpu.get_AXIS_rank()` and `mpu.get_AXIS_world_size()` of the axes tensor_model_parallel,
    pipeline_model_parallel, data_parallel and context_parallel. Groups are not given out."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        parts = re.fullmatch(r"get_(\w+?)_(rank|world_size)", name)
        if parts is None or parts[1] not in _AXES:
            raise AttributeError(
                f"mpu.{name}: there are ranks and sizes of {', '.join(_AXES)}; what loss_func "
                "returns is summed over context-parallel ranks, and what it reports averaged over "
                "ranks, by the suite: omit the all_reduce, and a factor context_parallel_size",
                name=name,
                obj=self,
            )

        def ask(with_context_parallel: bool = False) -> int:
            both = with_context_parallel and parts[1] == "data_parallel"
            axis = context().axis("dp_cp" if both else _AXES[parts[1]])
            return axis.rank if parts[2] == "rank" else axis.size

        return ask

    def is_pipeline_first_stage(self, ignore_virtual: bool = True, vp_stage: Any = None) -> bool:
        """Has this rank the first pipeline stage? All its virtual stages count as one."""
        return context().pp.rank == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = True, vp_stage: Any = None) -> bool:
        """Has this rank the last one?"""
        return context().pp.rank == context().pp.size - 1


mpu = Mpu()


class TensorParallel:
    """`tensor_parallel.broadcast_data`."""

    @staticmethod
    def broadcast_data(
        keys: Sequence[str], data: Mapping[str, Any] | None, datatype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Of a micro-batch, which every rank has, the tensors `keys` as `datatype`; "text" are the
        tokens with the last label, [b, s + 1]. Raises ValueError for other labels or keys."""
        import torch

        assert data is not None, "every rank has the data"
        chosen = {}
        for key in keys:
            if key == "text" and key not in data:
                tokens, labels = data["tokens"], data["labels"]
                if not torch.equal(tokens[:, 1:], labels[:, :-1]):
                    raise ValueError(
                        "broadcast_data: labels are not the next tokens here, with context "
                        "parallelism or data of one's own; take tokens and labels, in place of "
                        "text [no-such-argument]"
                    )
                chosen[key] = torch.cat((tokens, labels[:, -1:]), 1).to(datatype)
                continue
            if data.get(key) is None:
                raise ValueError(
                    f"broadcast_data: the micro-batch has no {key}; it has text and "
                    f"{', '.join(data)} [no-such-argument]"
                )
            chosen[key] = data[key].to(datatype)
        return chosen


tensor_parallel = TensorParallel()


def average_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of each loss over the data-parallel ranks, [number of losses]. Every one of them
    must call it; a collective. `loss_func` need not: its report is averaged anyway."""
    import torch

    from megatron.parallel.collectives import all_reduce

    dp = context().dp
    return all_reduce(torch.stack([loss.detach().reshape(()) for loss in losses]), dp) / dp.size


def core_transformer_config_from_args(args: Any, config_class: Any = None) -> Arguments:
    """The configuration: `get_args()` itself."""
    return get_args()


def _check_same(name: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that say something else than the flags."""
    args = get_args()
    for key, value in given.items():
        if value is not None and value != getattr(args, key):
            raise ValueError(
                f"{name}: {key} is {value}, by the flags {getattr(args, key)}; change the flag "
                "[model-argument]"
            )


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = None,
    qk_layernorm: bool | None = None,
    **others: Any,
) -> None:
    """None: layers are made as the flags say, which the arguments must not contradict."""
    _check_same("layer spec", {"num_experts": num_experts, "qk_layernorm": qk_layernorm})
    _check_same("layer spec", {k: v for k, v in others.items() if k == "normalization"})


def get_gpt_layer_with_transformer_engine_spec(*given: Any, **named: Any) -> None:
    """The same; --transformer-impl says what computes them."""
    get_gpt_layer_local_spec(*given, **named)


def get_batch_on_this_tp_rank(data: Any, **others: Any) -> Mapping[str, Any]:
    """The micro-batch, whole on each tensor-parallel rank: the next one of an iterator, or what is
    given."""
    return next(data) if isinstance(data, Iterator) else data


def get_batch_on_this_cp_rank(batch: Mapping[str, Any], **others: Any) -> Mapping[str, Any]:
    """What is given: `next(data_iterator)` has this rank's part of the sequence."""
    return batch


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    **others: Any,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(attention_mask, loss_mask, position_ids) of the micro-batch, as `next(data_iterator)` has
    them. Raises ValueError for arguments that say something else than the flags."""
    from megatron.training.script_step import current

    _check_same(
        "get_ltor_masks_and_position_ids",
        {
            "reset_position_ids": reset_position_ids,
            "reset_attention_mask": reset_attention_mask,
            "eod_mask_loss": eod_mask_loss,
        },
    )
    return current["attention_mask"], current["loss_mask"], current["position_ids"]


class GPTDataset:
    """For the builder: the data that --data-path and the like name."""


class MockGPTDataset(GPTDataset):
    """For the builder: those of --mock-data."""


class GPTDatasetConfig(SimpleNamespace):
    """For the builder: what the flags say, by Megatron's names."""

    mock = False


class BlendedMegatronDatasetBuilder:
    """Megatron's, called with the class of data sets, the samples needed, perhaps which ranks build
    them, and the configuration, last. Raises ValueError for what the flags do not say."""

    def __init__(self, cls: type, sizes: Sequence[int | None], *others: Any):
        config = vars(others[-1])
        mock = cls is MockGPTDataset
        if cls not in (GPTDataset, MockGPTDataset) or mock != bool(get_args().mock_data):
            raise ValueError(
                f"BlendedMegatronDatasetBuilder: {cls.__name__} is not the data of the flags; take "
                "MockGPTDataset with --mock-data, else GPTDataset, or return data sets of your own "
                "[model-argument]"
            )
        renamed = {"sequence_length": "seq_length", "random_seed": "seed", "blend": "data_path"}
        same = ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        checked = renamed | {name: name for name in same}
        said = {checked[name]: value for name, value in config.items() if name in checked}
        _check_same("GPTDatasetConfig", said)
        self._sizes = sizes

    def build(self) -> list[OfFlags]:
        """For the provider to return."""
        return [OfFlags(size) for size in self._sizes]


def get_blend_from_list(blend: Sequence[str] | None) -> Sequence[str] | None:
    """What is given: the builder reads it as --data-path."""
    return blend


class StragglerDetector:
    """`with stimer(bdata=True):` and `with stimer:` time nothing: --log-straggler does."""

    def __call__(self, bdata: bool = False) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
