"""The writers of a run: what stores the results of its iterations."""

from megatron import launcher
from megatron.config.tree import Config
from megatron.training.feature import features_of
from megatron.training.logging.iteration import ResultWriter


def open_writers(config: Config, world_size: int) -> list[ResultWriter]:
    """The requested files and services of the last rank; on other ranks there are none. Raises
    ValueError or OSError where one cannot be opened."""
    logging = config.logging
    writers: list[ResultWriter] = []
    if launcher.rank() == launcher.world_size() - 1:
        if logging.metrics_file:
            from megatron.training.logging.metrics_file import MetricsFile
            from megatron.training.logging.output import OutputFile

            file = OutputFile(logging.metrics_file, "--metrics-file")
            writers.append(MetricsFile(file, config.model.seq_length))
        for feature in features_of(config):
            writers += feature.writers(config, world_size)
    return writers
