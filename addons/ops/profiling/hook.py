"""Profiles of some iterations: a trace of torch.profiler, or a range for an outside profiler."""

from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from megatron import cuda, log
from megatron import device as devices
from megatron.config.tree import Config
from megatron.small_files import make_directories
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run


def trace_directory(config: Config) -> Path:
    """Where traces are written: where a feature shows them, or `profile` in --save or here."""
    folders = (demands.profile_folder for demands in config.demands)
    shown = next(filter(None, folders), None)
    return Path(shown) if shown else Path(config.checkpoint.save or ".") / "profile"


class Profiling(Hook):
    """--profile: profiles iterations --profile-step-start + 1 to --profile-step-end of this rank.
    It comes first, so that a profile holds nothing of the other hooks.

    A trace has an event for every forward pass of a module, under the module's name.
    """

    before = ("OwnModelChecks", "StoreReads", "SpikeDetection", "IterationLog")
    after = ("HangWatch",)

    def __init__(self, run: Run, first: int, last: int, records: bool):
        """Iterations `first` to `last`; `records`: by torch.profiler."""
        self._first = first
        self._last = last
        self._records = records
        self._modules = list(run.model)
        self._rank = run.runtime.rank
        self._device = run.runtime.device
        self._directory = trace_directory(run.config)
        self._running = False
        self._profile: profile | None = None
        self._hooks: list[RemovableHandle] = []

    def before_step(self, iteration: int) -> None:
        """Start, if this iteration is the first to be profiled (or a run resumes within them)."""
        if not self._running and self._first <= iteration <= self._last:
            self._running = True
            self._start()

    def after_step(self, result: IterationResult) -> None:
        """Stop after the last profiled iteration."""
        if result.iteration >= self._last:
            self.on_end()

    def on_end(self) -> None:
        """Stop, and write what was recorded."""
        if not self._running:
            return
        self._running = False
        devices.synchronize(self._device)
        if self._profile is None:
            cuda.stop_capture(self._device)
            return
        self._profile.stop()
        for hook in self._hooks:
            hook.remove()
        self._write(self._profile)
        self._profile = None

    def _start(self) -> None:
        devices.synchronize(self._device)
        if not self._records:
            cuda.start_capture(self._device)
            return
        for module in self._modules:
            self._hooks += _name_forward_passes(module)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _write(self, trace: profile) -> None:
        """A file that cannot be written is a warning: the run continues."""
        name = f"rank{self._rank}_iterations_{self._first}_{self._last}.pt.trace.json.gz"
        path = self._directory / name
        try:
            make_directories(self._directory)
            trace.export_chrome_trace(str(path))
        except OSError as error:
            log.warn_once(f"--profile: {path} cannot be written: {error.strerror or error}")
        else:
            log.print_line(f"profile written to {path}")


def _name_forward_passes(root: nn.Module) -> list[RemovableHandle]:
    """Hooks that open a profiler event with a module's name around its forward pass."""
    open_events: list[record_function] = []
    handles = []

    def enter(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            open_events.append(record_function(name))
            open_events[-1].__enter__()

        return hook

    def leave(module: nn.Module, args: tuple, output: object) -> None:
        open_events.pop().__exit__(None, None, None)

    for name, module in root.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or type(root).__name__)))
        handles.append(module.register_forward_hook(leave))
    return handles
