"""Where the results of an iteration go: log line and writers."""

from collections.abc import Callable, Mapping

from megatron import device as devices
from megatron import launcher, log
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis
from megatron.timers import Timers
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import flops
from megatron.training.logging.iteration import Interval, LogFormat, ResultWriter
from megatron.training.logging.short_format import ShortLog, perplexity
from megatron.training.result import IterationResult


class TrainingLog:
    """Gathers iterations into intervals and writes them down. Lines and files are the last rank's,
    as Megatron's."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        timers: Timers,
        world: Axis,
        writers: list[ResultWriter],
        runtime: Runtime | None = None,
    ):
        self._config = config
        self._plan = plan
        self._timers = timers
        self._world = world
        self._interval = Interval()
        self._flops = flops.flops_per_sample(config, plan)
        self.writers = writers
        self._runtime = runtime
        self._memory_printed = False
        self._latest: IterationResult | None = None
        make = config.added("log_format")
        self._format: LogFormat = (
            make(config, plan, runtime)
            if make
            else ShortLog(config, plan, launcher.rank() == launcher.world_size() - 1)
        )

    def take_plan(self, plan: Plan) -> None:
        """From now on count what `plan` has: the operations of a script's own model, which is said,
        the iterations to skip."""
        if plan.own_model and not self._plan.own_model:
            self._flops = flops.flops_per_sample(self._config, plan)
            log.print_rank_0(
                f" > model of the script: {plan.own_model}, {plan.num_parameters:,} parameters; "
                "throughput counts 6 operations for each and token, without attention"
            )
        self._plan = self._format.plan = plan

    @property
    def intervals(self) -> tuple[int, ...]:
        """Something is written at multiples of these; the same on all ranks."""
        logging = self._config.logging
        return (
            1 if logging.metrics_file else logging.log_interval,
            logging.log_interval,
        )

    def start(self, seconds: float, arguments: Callable[[], Mapping[str, object]]) -> None:
        """The lines that end Megatron's initialisation; `arguments` of the run are for the
        writers."""
        log.detail(f"time to initialize megatron (seconds): {seconds:.3f}")
        log.detail_datetime("after megatron is initialized")
        self._format.start()
        for writer in self.writers:
            writer.arguments(arguments)

    def add(self, result: IterationResult) -> None:
        """Take in one iteration; print its line when the interval is full."""
        self._interval.add(result)
        self._format.add(result)
        if self.writers:
            self._write(result)
        self._latest = result
        if self._format.line_due(result.iteration):
            self._print(result)
            self._print_memory(result.iteration)
            if self._config.logging.timing_log_level > 0:
                self.timers(points_at=result.iteration)
        else:
            self._format.status(result.iteration, result.seconds)

    def leave(self) -> None:
        """No iteration follows; some formats have a line for the last one."""
        i = self._interval
        if self._format.ends_with_line and self._latest and (i.trained or i.user_skips):
            self._print(self._latest)

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:
        """The summary of --log-format short; `reason` to stop before the end of training."""
        self._format.finish(reason, iteration, checkpoint)

    def go_back(self) -> None:
        """Discard the iterations since the last line, after a rollback."""
        self._interval = Interval()
        self._latest = None

    def _teraflops(self, samples: int, seconds: float) -> float | None:
        """TFLOP/s of a rank."""
        if seconds <= 0:
            return None
        return flops.teraflops_per_rank(samples * self._flops, seconds, self._plan.world_size)

    def _print(self, result: IterationResult) -> None:
        interval = self._interval
        teraflops = self._teraflops(interval.samples, interval.seconds)
        self._format.line(result, interval, teraflops)
        self._interval = Interval()

    def _memory(self) -> Mapping[str, float]:
        return devices.memory_report(self._runtime.device) if self._runtime else {}

    def _print_memory(self, iteration: int) -> None:
        """Once, from every rank that is first among those that hold the same weights; nothing on
        CPU."""
        if self._memory_printed or self._runtime is None or self._runtime.ctx.dp.rank:
            return
        self._memory_printed = True
        report = self._memory()
        if report:
            log.print_line(self._format.memory(launcher.rank(), iteration, report))

    def _write(self, r: IterationResult) -> None:
        trained = r.skipped != "user"
        teraflops = self._teraflops(r.global_batch_size, r.seconds) if trained else None
        for writer in self.writers:
            writer.iteration(r, teraflops, self._memory)

    def validation(
        self,
        prefix: str,
        losses: dict[str, float],
        iteration: int,
        samples: int,
        suffix: str = "",
        *,
        split: str = "validation",
        final: bool = False,
        bits_per_byte: float | None = None,
    ) -> None:
        """The lines and points of an evaluation; `split` is validation or test, `suffix` says of
        which of several sets, `final` that no iteration follows, `bits_per_byte` is there where
        the data say how many bytes their tokens are."""
        name = f"{'final ' if final and split == 'validation' else ''}{split}{suffix}"
        log.print_rank_last(self._format.evaluation(prefix, name, iteration, losses, bits_per_byte))
        for key, loss in losses.items():
            values = {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_byte}
            for writer in self.writers:
                writer.evaluation(key, f"{split}{suffix}", iteration, samples, values)

    def task_scores(self, iteration: int, samples: int, scores: Mapping[str, float]) -> None:
        """The line, the metrics and the points of scores by task and metric."""
        values = " | ".join(f"{name} {score:.4f}" for name, score in scores.items())
        log.print_rank_last(f" tasks at iteration {iteration} | {values}")
        for writer in self.writers:
            writer.tasks(iteration, samples, scores)

    def timers(self, names: list[str] | None = None, points_at: int | None = None) -> None:
        """Print the timers block of these names (all, without names) over all ranks, and start them
        again.

        With --log-format short only where --timing-log-level asks for timers.
        """
        own = self._timers.pop(names)
        logging = self._config.logging
        if logging.is_short and not logging.timing_log_level:
            return
        ranks = gather_objects(own, self._world)
        order = list(dict.fromkeys(name for rank in ranks for name in rank))
        from megatron.training.logging.line_format import timers_block

        text = timers_block(order, ranks, logging.timing_log_option)
        if text:
            log.print_rank_last(text)
        if points_at is not None:
            longest = {name: max(rank.get(name, 0.0) for rank in ranks) for name in order}
            for writer in self.writers:
                writer.timers(longest, points_at)

    def flush(self) -> None:
        """Write what is still in memory."""
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """Write what is still in memory; no more will come."""
        for writer in self.writers:
            writer.close()
