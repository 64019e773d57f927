"""--fim-data: samples whose documents are rearranged so that a model learns to fill in the
middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.tree import Config
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.config.command_line import CommandLine
    from megatron.data.sources import DataSource
    from megatron.data.tokenizers.base import Tokenizer

# Sources of samples without text, or of samples with parts of their own.
_EXCLUDED = ("mock_data", "dummy_data", "packed_samples")
_of_data = partial(arg, needs="fim_data")


@dataclass(frozen=True)
class FimConfig(Feature):
    """Fill in the middle."""

    fim_data: bool = arg(False, excludes=_EXCLUDED)
    """fill in the middle: documents of samples are cut in three, and the model reads prefix and
    suffix before the middle (--fim-rate); training, validation and test"""

    fim_rate: float = arg(0.5, minimum=0, maximum=1)
    """share of the documents, or of their parts in a sample, that are rearranged"""

    fim_spm_rate: float = _of_data(0.5, minimum=0, maximum=1)
    """share of the rearranged ones in the order suffix, prefix, middle; the others are prefix,
    suffix, middle"""

    fim_split_sample: str | None = _of_data(None, requires="fim_fragment_rate")
    """token at which a document is cut into fragments (files of a repository, say), each of which
    is rearranged by itself"""

    fim_fragment_rate: float | None = arg(
        None, needs="fim_split_sample", minimum=0, maximum=1, alias=("--fragment-fim-rate",)
    )
    """with --fim-split-sample: share of the fragments that are rearranged, in the --fim-rate of
    documents that have any"""

    fim_no_prefix: str | None = _of_data(None, metavar="TEXT")
    """what begins with this text stays as it is"""

    fim_prefix_token: str = _of_data("<fim_prefix>")
    """the tokenizer's token before the prefix"""

    fim_middle_token: str = _of_data("<fim_middle>")
    """the tokenizer's token before the middle"""

    fim_suffix_token: str = _of_data("<fim_suffix>")
    """the tokenizer's token before the suffix"""

    fim_pad_token: str = _of_data("<fim_pad>")
    """the tokenizer's token that fills a sample which became shorter"""

    fim_eod_token: str = _of_data("<|endoftext|>")
    """the tokenizer's token that ends a document"""

    fim_keep_special_tokens: bool = _of_data(False)
    """special tokens of a rearranged document stay, as in BigCode's Megatron-LM; Megatron-LM omits
    them"""

    def check(self, facts: Facts) -> Iterator[str]:
        """What has no meaning without --fim-data, or with what else names the samples."""
        rate = facts.say("fim_rate")
        if not self.fim_data and "fim_rate" in facts.typed:
            yield (
                f"{rate}: Megatron-LM rearranges documents with --fim-data alone, BigCode's "
                "without; add --fim-data, or omit the flag [fim-without-data]"
            )
        stages = [
            name
            for name in ("stage_file", "phase_transition_iterations")
            if self.fim_data and facts.values.get(name)
        ]
        yield from (
            f"--fim-data and {facts.say(name)}: only one of these can be given "
            "[flags-exclude-each-other]"
            for name in stages
        )

    def tokenizer_problems(self, tokenizer: Tokenizer, line: CommandLine) -> Iterator[str]:
        """That it has the tokens."""
        if self.fim_data:
            from .middle import Ids

            try:
                Ids.of(self, tokenizer)
            except ValueError as error:
                yield str(error)

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """Its samples, rearranged."""
        if not self.fim_data:
            return source
        from .source import FimSource

        return FimSource(source, self)
