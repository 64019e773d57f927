"""What is printed and where numbers are kept. Knows no torch."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, metrics file, TensorBoard, timers."""
    log_interval: int = arg(100, help="iterations between log lines")
    log_dialect: Literal["megatron", "aurora", "internlm"] = arg("megatron", help="form of the iteration line", dump=False)
    metrics_file: str | None = arg(None, help="JSON lines, one an iteration", dump=False)
    data_ledger: str | None = arg(None, help="file of 32 bytes an iteration: which samples it read, and their hash "
                                             "(tools/inspect_data.py reads it)", dump=False)
    progress: Literal["auto", "on", "off"] = arg("auto", help="a line of progress and time left on stderr beside each "
                                                 "log line; auto: where stderr is a terminal", dump=False)
    log_subsets: bool = arg(False, help="tokens and loss of each data set of a blend in metrics file and TensorBoard; "
                                        "always with --packed-samples and --log-dialect internlm", dump=False)
    log_accuracy: bool = arg(False, help="with --log-subsets: share of labels that the model ranks first, in all and of "
                                         "each subset", dump=False)
    log_throughput: bool = arg(False, help="TFLOP/s on the iteration line")
    log_num_zeros_in_grad: bool = arg(False, help="count zeros in the gradients")
    log_params_norm: bool = arg(False, help="norm of the parameters on the iteration line")
    timing_log_level: Literal[0, 1, 2] = arg(0, help="detail of the timers block")
    timing_log_option: Literal["max", "minmax", "all"] = arg("minmax", help="what the timers block shows of the ranks")
    tensorboard_dir: str | None = arg(None, help="directory of TensorBoard events")
    tensorboard_log_interval: int = arg(1, help="iterations between TensorBoard points")
    tensorboard_queue_size: int = arg(1000, help="TensorBoard events kept before they are written")
    log_timers_to_tensorboard: bool = arg(False, help="timers as TensorBoard scalars")
    log_batch_size_to_tensorboard: bool = arg(False, help="batch size as a TensorBoard scalar")
    log_learning_rate_to_tensorboard: bool = arg(True, off="--no-log-learnig-rate-to-tensorboard",
                                                 help="no learning rate in TensorBoard (Megatron's spelling)")
    log_loss_scale_to_tensorboard: bool = arg(True, off="--no-log-loss-scale-to-tensorboard",
                                              help="no loss scale in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = arg(False, help="validation perplexity in TensorBoard")
    log_memory_to_tensorboard: bool = arg(False, help="device memory in TensorBoard")
    log_world_size_to_tensorboard: bool = arg(False, help="world size in TensorBoard")

    def counts_subsets(self, packed: bool) -> bool:
        """Are tokens and losses of each subset counted, where samples are `packed` or not?"""
        return packed or self.log_subsets or self.log_dialect == "internlm"
