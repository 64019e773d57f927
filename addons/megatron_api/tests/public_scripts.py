"""Own scripts with the imports of Megatron-LM's pretrain_gpt.py of several years, for tests: those
of test_scripts.py, under public names."""

from __future__ import annotations

import re

from megatron.addons.megatron_api.tests.test_scripts import OF_2024, OF_2026, OF_AUGUST_2026

OF_2023 = """
import torch
from functools import partial
from megatron import get_args
from megatron import get_timers, print_rank_0
from megatron import get_tokenizer
from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.data.gpt_dataset import build_train_valid_test_datasets
import megatron.model
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_with_transformer_engine_spec_moe
from megatron.training import pretrain
from megatron.arguments import core_transformer_config_from_args
from megatron.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_ltor_masks_and_position_ids,
)

def model_provider(pre_process=True, post_process=True) -> megatron.model.GPTModel:
    print_rank_0("the model is made now")
    return megatron.model.GPTModel(
        core_transformer_config_from_args(get_args()),
        num_tokentypes=0,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
    )

def batch_of(iterator):
    args = get_args()
    data = next(iterator) if iterator is not None else None
    text = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    attention_mask, mask, position_ids = get_ltor_masks_and_position_ids(
        tokens,
        get_tokenizer().eod,
        args.reset_position_ids,
        args.reset_attention_mask,
        args.eod_mask_loss,
    )
    batch = dict(tokens=tokens, labels=labels, mask=mask, seen=attention_mask, ids=position_ids)
    return get_batch_on_this_cp_rank(batch).values()

def loss_func(mask, output):
    loss = (output.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    assert not loss.isnan(), f"rank {torch.distributed.get_rank()}"
    torch.distributed.barrier(group=mpu.get_data_parallel_group())
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}

def forward_step(data_iterator, model):
    get_timers()("batch-generator", log_level=2).start()
    tokens, labels, mask, attention_mask, position_ids = batch_of(data_iterator)
    get_timers()("batch-generator").stop()
    return model(tokens, position_ids, attention_mask, labels=labels), partial(loss_func, mask)

def datasets_provider(sizes):
    args = get_args()
    return build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=sizes,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=not args.mmap_warmup,
        train_data_prefix=args.train_data_path,
    )

if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
"""


def public(script: str, lines: str) -> str:
    """The script with these lines in place of what it imports from megatron.training."""
    return re.sub(r"from megatron\.training import \(.*?\)\n", lines, script, count=1, flags=re.S)


# The model of the files beside NVIDIA's scripts of 2025 and 2026.
BUILT = re.sub(r"def builder\(.*?(?=def loss_func)", "", OF_2026, flags=re.S).replace(
    "partial(model_provider, builder)", "partial(model_provider, gpt_builder)"
)
PUBLIC = {
    "2023": OF_2023,
    "2024": public(
        OF_2024,
        """
from typing import Union
from megatron.core import mpu
import megatron.legacy.model
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.utils import StragglerDetector
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training.yaml_arguments import core_transformer_config_from_yaml

Model = Union[GPTModel, megatron.legacy.model.GPTModel]
""",
    ).replace("(args.num_experts, False)", "(args.num_experts, False, False, False, args.fp8)"),
    "2025": public(
        BUILT,
        """
from gpt_builders import gpt_builder
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.mamba import MambaModel
from megatron.core.utils import StragglerDetector
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.utils import get_ltor_masks_and_position_ids
from model_provider import model_provider

try:
    from megatron.post_training.arguments import add_modelopt_args
except ImportError:
    add_modelopt_args = None
""",
    ).replace(
        "    args = get_args()\n",
        "    args = get_args()\n    assert not mtp_on_this_rank(args, ignore_virtual=False)\n"
        "    assert not args.renormalize_blend_weights and args.s3_cache_path is None\n",
        1,
    ),
    "2026": public(
        OF_AUGUST_2026,
        """
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.package_info import __version__ as mcore_version
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_hybrid_data_context_parallel_groups,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_te_version,
    get_torch_version,
)
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

ON_A_GPU = torch.Tensor.cuda
""",
    )
    .replace(
        "batch = {name: data.get(name)",
        "data['tokens'] = data['tokens'].cuda()\n        batch = {name: data.get(name)",
    )
    .replace(
        "    assert args is get_args()",
        "    assert torch.Tensor.cuda is ON_A_GPU\n    assert args is get_args()",
    ),
}
PUBLIC["may 2026"] = (
    PUBLIC["2026"]
    .replace(
        "if __name__",
        "def model_provider(pre_process=True, post_process=True):\n    return GPTModel(pre_process=pre_process, post_process=post_process)\n\nif __name__",
    )
    .replace(
        "datasets_provider,\n        ModelType",
        "datasets_provider,\n        model_provider,\n        ModelType",
    )
)
