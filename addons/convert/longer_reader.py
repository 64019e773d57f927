"""What reads a checkpoint for a run whose tokenizer has more tokens (--extend-vocabulary)."""

from __future__ import annotations

import torch

from megatron import log
from megatron.checkpoint.reading import Checkpoint
from megatron.checkpoint.sharded_reader import Reader
from megatron.checkpoint.tensor_slices import Box, whole
from megatron.data.tokenizers.metadata import fingerprint
from megatron.optimizer.adam import STATE_KEYS
from megatron.training.preflight import build_tokenizer
from megatron.training.run import Run

from .added_tokens import AddedTokens, Way, added_tokens
from .links import is_vocabulary
from .longer_vocabulary import tokenizer_of
from .vocabulary import new_rows

_STATE = {key for keys in STATE_KEYS.values() for key in keys}


class LongerReader(Reader):
    """Reads what `reader` has, with rows of the added tokens behind the old ones of the vocabulary:
    of weights, and of what is kept of them, made of the old ones, which are the same in each
    layout; of the optimizer's state zeros."""

    def __init__(self, reader: Reader, added: AddedTokens, seed: int):
        vars(self).update(vars(reader))  # its open files and threads
        self._added = added
        self._seed = seed
        self._new: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Reader.shape`; of the vocabulary without padding."""
        shape = super().shape(name)
        return (self._added.size, *shape[1:]) if _is_of_vocabulary(name) else shape

    def read_later(self, name: str, box: Box | None, into: torch.Tensor) -> None:
        """See `Reader.read_later`."""
        if not _is_of_vocabulary(name):
            return super().read_later(name, box, into)
        (start, stop), *columns = box or whole(self.shape(name))
        old = max(0, min(stop, self._added.first) - start)
        if old:
            super().read_later(name, ((start, start + old), *columns), into[:old])
        if old < len(into):
            after = start + old - self._added.first
            rows = self._rows(name)[after : after + len(into) - old]
            into[old:].copy_(rows[(slice(None), *(slice(*column) for column in columns))])

    def _rows(self, name: str) -> torch.Tensor:
        """Those of the added tokens, all columns."""
        if name not in self._new:
            columns = self.shape(name)[1:]
            if name.startswith("optimizer.") and name.split(".", 2)[1] in _STATE:
                count = self._added.size - self._added.first
                self._new[name] = torch.zeros(count, *columns, dtype=self.dtype(name))
            else:
                old = self.read(name, whole((self._added.first, *columns)))
                self._new[name] = new_rows(old, self._added, self._seed)
        return self._new[name]


def _is_of_vocabulary(name: str) -> bool:
    """Has this tensor of a checkpoint, the optimizer's too, a row for each id?"""
    return is_vocabulary(name.split(".", 2)[2] if name.startswith("optimizer.") else name)


def longer_reader(reader: Reader, run: Run, checkpoint: Checkpoint, way: Way) -> Reader:
    """`reader`, with rows for what the run's tokenizer adds to that of the checkpoint, if it does.
    Raises ValueError where it is another one."""
    saved = checkpoint.state.data.get("tokenizer")
    if not saved or fingerprint(saved) == fingerprint(run.tokenizer):
        return reader
    old = tokenizer_of(checkpoint.directory, saved, type(run.config))
    new = build_tokenizer(run.config)
    added = added_tokens(old, new, way, checkpoint.directory, "--extend-vocabulary")
    if reader.of_one_rank:
        raise ValueError(
            f"--extend-vocabulary {way}: {checkpoint.directory} has the part of one rank, whose "
            "vocabulary cannot be extended; omit --non-persistent-ckpt-type "
            "[flags-exclude-each-other]"
        )
    log.print_rank_0(f" --extend-vocabulary {way}: {checkpoint.directory} goes on with {added}")
    return LongerReader(reader, added, run.config.training.seed)
