"""What scripts import from Megatron besides the loop itself, with its names and arguments: the
batch of a rank, the configuration and the layers of its GPT, its data, checks of results.

The suite hands every rank its micro-batch, and the model is that of the flags: so these say what is
there, and refuse what would be something else.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from megatron import log
from megatron.config.plan.pipeline_layout import mtp_is_apart
from megatron.data.script_datasets import OfFlags
from megatron.training.script_args import Arguments, context, get_args, get_tokenizer
from megatron.version import VERSION

from .entry import parse_and_validate_args, pretrain, pretrain_cfg_container_from_args
from .ranks import is_first_or_last_pipeline_stage, mpu
from .script_imports import UNUSABLE, refuse, unusable
from .timers import get_timers

if TYPE_CHECKING:
    import torch

    from megatron.data.tokenizers.base import Tokenizer


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
broadcast_data = tensor_parallel.broadcast_data
parallel_state = mpu
# that of Megatron-LM of August 2026, whose calls these are, and ours
__version__ = f"0.20.0+suite.{VERSION}"


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


def gpt_config_from_args(
    args: Any, config: Any = None, model_config_cls: type | None = None
) -> Arguments:
    """The same. Raises ValueError for a class of the script."""
    if model_config_cls is not None:
        raise ValueError(
            f"gpt_config_from_args: {model_config_cls.__name__} is not the model of the flags; "
            "leave it out, or return a model of your own from model_provider [no-such-argument]"
        )
    return get_args()


def build_tokenizer(args: Any) -> Tokenizer:
    """The tokenizer of the run."""
    return get_tokenizer()


def _check_same(name: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that say something else than the flags."""
    args = get_args()
    for key, value in values.items():
        if value is not None and value != getattr(args, key):
            raise ValueError(
                f"{name}: {key} is {value}, by the flags {getattr(args, key)}; change the flag "
                "[model-argument]"
            )


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = None,
    qk_layernorm: bool | None = None,
    multi_latent_attention: bool | None = None,
    fifth: str | bool | None = None,
    **kwargs: Any,
) -> None:
    """None: layers are made as the flags say, which the arguments must not contradict. `fifth`:
    in 2024 --fp8-format, in 2025 an older grouped GEMM, in 2026 an experimental attention."""
    args = get_args()
    if fifth and fifth != args.fp8:
        kwargs["experimental_attention_variant"] = fifth
    checked = {
        "num_experts": num_experts,
        "qk_layernorm": qk_layernorm,
        "multi_latent_attention": multi_latent_attention,
    }
    same = ("normalization", "qk_l2_norm", "experimental_attention_variant", "fp8")
    _check_same("layer spec", checked | {k: v for k, v in kwargs.items() if k in same})


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> None:
    """The same; --transformer-impl says what computes them."""
    get_gpt_layer_local_spec(*args, **kwargs)


def get_gpt_decoder_block_spec(
    config: Any, use_transformer_engine: bool | None = None, **kwargs: Any
) -> None:
    """The same, of a model with experts."""
    get_gpt_layer_local_spec(**kwargs)


def get_gpt_decoder_layer_specs(*args: Any, **kwargs: Any) -> list[None]:
    """The same, of each layer."""
    get_gpt_decoder_block_spec(*args, **kwargs)
    return [None]


def get_transformer_block_with_experimental_attention_variant_spec(*_: Any, **__: Any) -> None:
    """None: --experimental-attention-variant says it."""


def get_transformer_layer_with_experimental_attention_variant_spec(
    *_: Any, **__: Any
) -> list[None]:
    """The same, of each layer."""
    return [None]


def get_gpt_mtp_block_spec(*args: Any, **kwargs: Any) -> None:
    """None: --mtp-num-layers says it."""


def gpt_builder(args: Any, pre_process: bool, post_process: bool, *_: Any, **__: Any) -> Any:
    """The GPT of the flags."""
    from megatron.training.script_model import GPTModel

    return GPTModel(pre_process=pre_process, post_process=post_process)


def model_provider(
    model_builder: Callable[..., Any],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **kwargs: Any,
) -> Any:
    """What `model_builder` makes of the arguments of the run."""
    return model_builder(get_args(), pre_process, post_process, vp_stage, **kwargs)


# All that the micro-batch of Megatron's current script may have.
_BATCH_KEYS = ("cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "local_cp_size", "max_seqlen")


def get_batch_on_this_tp_rank(data: Any, **kwargs: Any) -> Mapping[str, Any]:
    """The micro-batch of an iterator, whole on each tensor-parallel rank. Or what the first of
    these ranks gives, on all of them: a dictionary with keys of the micro-batch, as Megatron's
    script fills it; a collective. Raises ValueError for a tensor of another shape."""
    if isinstance(data, Iterator):
        return next(data)
    return dict.fromkeys(_BATCH_KEYS) | _of_first_rank(data)


def _of_first_rank(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the first tensor-parallel rank. Those it has left as they are, are there
    already; what it has changed is sent."""
    import torch

    from megatron.parallel.collectives import broadcast_
    from megatron.training.script_step import current

    tp = context().tp
    if tp.size == 1:
        return {**data}
    batch, device = dict(current), current["tokens"].device
    # of each key: as it is (0), no tensor (1), another tensor (2)
    states = [
        0 if data.get(key) is value else 1 if data.get(key) is None else 2
        for key, value in batch.items()
    ]
    for key, state in zip(
        batch, broadcast_(torch.tensor(states, device=device), tp).tolist(), strict=True
    ):
        if state == 1:
            batch[key] = None
        elif state == 2:
            batch[key] = broadcast_(_shaped_as(key, data if tp.rank == 0 else batch, batch), tp)
    return batch


def _shaped_as(key: str, data: Mapping[str, Any], current: Mapping[str, Any]) -> torch.Tensor:
    """A copy of a tensor, to send or to overwrite. Raises ValueError for another shape or dtype."""
    import torch

    wanted, tensor = current[key], data[key]
    if wanted is None or (wanted.shape, wanted.dtype) != (tensor.shape, tensor.dtype):
        kind = "None" if wanted is None else f"{list(wanted.shape)} of {wanted.dtype}"
        raise ValueError(
            f"get_batch_on_this_tp_rank: {key} is {list(tensor.shape)} of {tensor.dtype}, in the "
            f"micro-batch {kind}; keep its form [no-such-argument]"
        )
    return torch.clone(tensor, memory_format=torch.contiguous_format)


def get_batch_on_this_cp_rank(batch: Mapping[str, Any], **kwargs: Any) -> Mapping[str, Any]:
    """What is given: `next(data_iterator)` has this rank's part of the sequence."""
    return batch


def flatten_batch_for_packed_sequences(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is given: documents are told apart by --reset-attention-mask, not by lengths."""
    return batch


def finalize_packed_seq_params(packed_seq_params: None) -> None:
    """Nothing, for the same reason; nor is there a policy for their padding."""


def resolve_thd_tail_padding_policy(config: Any) -> None:
    """None."""


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True) -> Any:
    """An attribute of the model, which nothing wraps; None where it has none, as of `vp_stage`: all
    virtual stages of a rank count as one. Raises RuntimeError instead without `allow_none`."""
    value = getattr(model, attr, None)
    if value is None and not allow_none:
        raise RuntimeError(f"get_attr_wrapped_model: the model has no {attr}")
    return value


def mtp_on_this_rank(config: Any = None, ignore_virtual: bool = True, **of_flags: Any) -> bool:
    """Are layers of multi-token prediction here? All virtual stages of a rank count as one;
    `config` and the rest say what the flags say."""
    stages = range(mpu.get_pipeline_model_parallel_world_size())
    return mpu.get_pipeline_model_parallel_rank() in get_mtp_ranks(stages, config)


def get_mtp_ranks(pp_ranks: Sequence[int], config: Any) -> list[int]:
    """Of a pipeline's ranks that with such layers: the last one, or the one before it by
    --pipeline-model-parallel-layout."""
    args = get_args()
    apart = mtp_is_apart(args.pipeline_model_parallel_layout)
    return [pp_ranks[-1 - apart]] if args.mtp_num_layers else []


class RerunStateMachine:
    """Checks of results, as of Megatron with --rerun-mode disabled: nothing is computed twice;
    --verify-step-interval does that for whole steps."""

    def __init__(self) -> None:
        self._largest: dict[str, tuple[int, float]] = {}  # context: values seen, the largest

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Any = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Raise ValueError if `rejection_func(result)` is true and `fatal`, else print a warning of
        this rank. Waits for the device. A tensor without values passes (--trace)."""
        if type(result).__name__ == "FakeTensor" or not rejection_func(result):
            return
        value = result.item() if hasattr(result, "item") else result
        text = f"rank {context().rank}: {message}: {value}; see the loss_func [result-rejected]"
        if fatal:
            raise ValueError(text)
        log.print_line(f"WARNING: {text}")

    def is_unexpectedly_large(
        self,
        result: Any,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> bool:
        """Is it `threshold` times as large as the largest of the first `num_samples` values of
        `context`, or larger? False for these values themselves."""
        value = abs(float(result))
        count, largest = (0, 0.0) if resample else self._largest.get(context, (0, 0.0))
        if count >= num_samples:
            return value >= threshold * largest
        if math.isfinite(value):
            self._largest[context] = count + 1, max(largest, value)
        return False


_rerun_state_machine = RerunStateMachine()


def get_rerun_state_machine() -> RerunStateMachine:
    """That of this process."""
    return _rerun_state_machine


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    **kwargs: Any,
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

    def __init__(self, cls: type, sizes: Sequence[int | None], *arguments: Any):
        config = dict(vars(arguments[-1]))
        mock = cls is MockGPTDataset
        if cls not in (GPTDataset, MockGPTDataset) or mock != bool(get_args().mock_data):
            raise ValueError(
                f"BlendedMegatronDatasetBuilder: {cls.__name__} is not the data of the flags; take "
                "MockGPTDataset with --mock-data, else GPTDataset, or return data sets of your own "
                "[model-argument]"
            )
        renamed = {"sequence_length": "seq_length", "random_seed": "seed"}
        same = ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        checked = renamed | {name: name for name in same}
        values = {checked[name]: value for name, value in config.items() if name in checked}
        blend = config.get("blend")
        if isinstance(blend, tuple):  # as `get_blend_from_list` has it
            blend = None if blend == get_blend_from_list(get_args().data_path) else blend
        _check_same("GPTDatasetConfig", {**values, "data_path": blend})
        self._sizes = sizes

    def build(self) -> list[OfFlags]:
        """For the provider to return."""
        return [OfFlags(size) for size in self._sizes]


def build_train_valid_test_datasets(
    data_prefix: Sequence[str] | None = None,
    data_impl: str | None = None,
    splits_string: str | None = None,
    train_valid_test_num_samples: Sequence[int | None] = (),
    seq_length: int | None = None,
    seed: int | None = None,
    *_: Any,
    **__: Any,
) -> list[OfFlags]:
    """The data of the flags, as scripts up to 2023 ask for them. Raises ValueError for what the
    flags do not say."""
    values = {"data_path": data_prefix, "split": splits_string}
    sizes = {"seq_length": seq_length, "seed": seed}
    _check_same("build_train_valid_test_datasets", {**values, **sizes})
    return [OfFlags(size) for size in train_valid_test_num_samples]


Blend = tuple[Sequence[str], Sequence[float] | None]


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """(prefixes, weights) of the words of --data-path; weights are None where they have none."""
    if blend is None:
        return None
    try:
        weights = [float(word) for word in blend[::2]]
    except ValueError:
        return blend, None
    if len(blend) % 2:
        return blend, None
    return [prefix.strip() for prefix in blend[1::2]], weights


def get_blend_and_blend_per_split(
    args: Any,
) -> tuple[Blend | None, list[Blend | None] | None]:
    """(that of --data-path, those of --train-data-path, --valid-data-path and --test-data-path); of
    files that name data, None: the builder reads them."""
    paths = [args.train_data_path, args.valid_data_path, args.test_data_path]
    per_split = [get_blend_from_list(path) for path in paths] if any(paths) else None
    return get_blend_from_list(args.data_path), per_split


class StragglerDetector:
    """`with stimer(bdata=True):` and `with stimer:` time nothing: --log-straggler does."""

    def __call__(self, bdata: bool = False) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class inprocess_restart:  # noqa: N801 (a module of Megatron)
    """Megatron's module: a run is restarted by its launcher, and resumes."""

    @staticmethod
    def maybe_wrap_for_inprocess_restart(entry: Callable) -> tuple[Callable, None]:
        """(`entry`, no store)."""
        return entry, None


def get_num_microbatches() -> int:
    """Micro-batches of a step on one rank."""
    args = get_args()
    return get_current_global_batch_size() // (args.micro_batch_size * args.data_parallel_size)


def get_current_global_batch_size() -> int:
    """--global-batch-size. Raises ValueError where --rampup-batch-size changes it."""
    args = get_args()
    if args.rampup_batch_size:
        raise ValueError(
            "get_current_global_batch_size: not known with --rampup-batch-size; omit the flag "
            "[no-such-argument]"
        )
    return args.global_batch_size


def set_startup_timestamps(
    program_start: float | None = None, main_entry: float | None = None
) -> None:
    """Nothing: the time of the start is taken where `pretrain` is imported."""


def get_torch_version() -> str:
    """torch's version."""
    import torch

    return torch.__version__


def get_te_version() -> str:
    """Transformer Engine's version, or that there is none."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_OF_MPU = ("get_", "is_", "model_parallel_is_")
# Specs of 2023, which were no functions.
_LAYERS = ("gpt_layer_with_transformer_engine_spec", "gpt_layer_with_transformer_engine_spec_moe")


def has(name: str) -> bool:
    """Is it a name of `megatron.training`?"""
    is_of_mpu = name.startswith(_OF_MPU) and hasattr(mpu, name)
    return is_of_mpu or name in (*__all__, *_LAYERS) or name in UNUSABLE


def __getattr__(name: str) -> Any:
    if name in UNUSABLE:
        return unusable(name)
    if name in _LAYERS:
        return None
    if has(name):
        return getattr(mpu, name)
    raise AttributeError(name)


__all__ = [
    "BlendedMegatronDatasetBuilder",
    "GPTDataset",
    "GPTDatasetConfig",
    "MockGPTDataset",
    "StragglerDetector",
    "average_losses_across_data_parallel_group",
    "broadcast_data",
    "build_tokenizer",
    "build_train_valid_test_datasets",
    "core_transformer_config_from_args",
    "finalize_packed_seq_params",
    "flatten_batch_for_packed_sequences",
    "get_attr_wrapped_model",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "get_blend_from_list",
    "get_current_global_batch_size",
    "get_gpt_decoder_block_spec",
    "get_gpt_decoder_layer_specs",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_gpt_mtp_block_spec",
    "get_ltor_masks_and_position_ids",
    "get_mtp_ranks",
    "get_num_microbatches",
    "get_rerun_state_machine",
    "get_te_version",
    "get_timers",
    "get_torch_version",
    "get_transformer_block_with_experimental_attention_variant_spec",
    "get_transformer_layer_with_experimental_attention_variant_spec",
    "gpt_builder",
    "gpt_config_from_args",
    "inprocess_restart",
    "is_first_or_last_pipeline_stage",
    "model_provider",
    "mpu",
    "mtp_on_this_rank",
    "parallel_state",
    "parse_and_validate_args",
    "pretrain",
    "pretrain_cfg_container_from_args",
    "resolve_thd_tail_padding_policy",
    "set_startup_timestamps",
    "tensor_parallel",
    "refuse",
]
