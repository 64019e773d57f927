"""Every feature; no file but this one and its own names it. To add one, write
megatron/features/NAME/feature.py and name it here; to delete one, delete its folder and its lines.
"""

from __future__ import annotations

from megatron.config.tree import with_features
from megatron.features.boards.feature import BoardsConfig
from megatron.features.data_ledger.feature import DataLedgerConfig
from megatron.features.eval_tasks.feature import EvalTasksConfig
from megatron.features.goodput.feature import GoodputConfig
from megatron.features.internlm.feature import InternlmConfig
from megatron.features.megatron_cli.feature import MegatronCliConfig
from megatron.features.spikes.feature import SpikeConfig
from megatron.features.step_verification.feature import StepVerificationConfig
from megatron.features.stragglers.feature import StragglerConfig
from megatron.features.trace.feature import TraceConfig
from megatron.training.feature import Feature

FEATURES: tuple[type[Feature], ...] = (
    SpikeConfig,
    StragglerConfig,
    GoodputConfig,
    DataLedgerConfig,
    EvalTasksConfig,
    InternlmConfig,
    StepVerificationConfig,
    TraceConfig,
    MegatronCliConfig,
    BoardsConfig,
)
RunConfig = with_features(FEATURES)  # all flags of pretrain_gpt.py
READERS = tuple(feature.read_points for feature in FEATURES)  # of what they wrote of a run
