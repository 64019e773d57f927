"""The flags of TensorBoard and Weights & Biases."""

from dataclasses import dataclass

from megatron.arguments import Needs, arg

_BOARDS = Needs(
    "--tensorboard-dir or --wandb-project", lambda v: v["tensorboard_dir"] or v["wandb_project"]
)


@dataclass(frozen=True, kw_only=True)
class BoardFlags:
    """Flags of TensorBoard and Weights & Biases."""

    tensorboard_dir: str | None = arg(None, per_run=True)
    """directory of TensorBoard event files"""

    tensorboard_log_interval: int = arg(1, needs=_BOARDS, minimum=1)
    """iterations between points in TensorBoard and Weights & Biases"""

    tensorboard_queue_size: int = arg(1000, minimum=1, needs="tensorboard_dir")
    """number of TensorBoard events buffered before a write"""

    log_timers_to_tensorboard: bool = arg(False, needs=_BOARDS)
    """write timers to TensorBoard"""

    log_batch_size_to_tensorboard: bool = arg(False, needs=_BOARDS)
    """write the batch size to TensorBoard"""

    log_learning_rate_to_tensorboard: bool = arg(
        True, needs=_BOARDS, off="--no-log-learnig-rate-to-tensorboard"
    )
    """do not write the learning rate to TensorBoard (Megatron's spelling)"""

    log_loss_scale_to_tensorboard: bool = arg(
        True, needs=_BOARDS, off="--no-log-loss-scale-to-tensorboard"
    )
    """do not write the loss scale to TensorBoard"""

    log_validation_ppl_to_tensorboard: bool = arg(False, needs=_BOARDS)
    """write validation perplexity to TensorBoard"""

    log_memory_to_tensorboard: bool = arg(
        False,
        needs=[_BOARDS, Needs("an accelerator (--device is cpu)", lambda v: v["device"] != "cpu")],
    )
    """write device memory to TensorBoard"""

    log_world_size_to_tensorboard: bool = arg(False, needs=_BOARDS)
    """write the world size to TensorBoard"""

    wandb_project: str = arg("")
    """Weights & Biases project that gets the scalars of TensorBoard (pip install wandb)"""

    wandb_exp_name: str = arg("", per_run=True, needs="wandb_project")
    """name of the run at Weights & Biases (default: a random one)"""

    wandb_entity: str = arg("", needs="wandb_project")
    """team or user at Weights & Biases (default: the account's)"""

    wandb_save_dir: str = arg("", per_run=True, needs="wandb_project")
    """directory of wandb's files (default: wandb in --save)"""

    @property
    def written(self) -> bool:
        """Are scalars written to TensorBoard or Weights & Biases?"""
        return bool(self.tensorboard_dir or self.wandb_project)
