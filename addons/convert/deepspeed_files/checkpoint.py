"""deepspeed-import: Megatron-DeepSpeed's checkpoints, weights in one file per tensor-parallel rank
(mp_rank_XX_model_states.pt), or with its pipeline in one per layer and tensor-parallel rank
(layer_XX-model_YY-model_states.pt); the optimizer in ZeRO's files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.state import RunState
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import OUTPUT_LAYER, WORD_EMBEDDING, ParameterSpec
from megatron.small_files import path_inside, read_text, safe_name

from ..deepspeed_files.optimizer import ZeroOptimizer
from ..links import ConversionError, optimizer_entries
from ..megatron_layout import MegatronCheckpoint, megatron_import
from ..megatron_names import our_name
from ..torch_files import read_all

LATEST = "latest"
_RANK = re.compile(r"mp_rank_(\d{2,})_model_states\.pt")
_LAYER = re.compile(r"layer_(\d{2,})-model_(\d{2,})-model_states\.pt")
_REFUSED = (
    (re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt"), "ZeRO 3"),
    (re.compile(r"(layer_\d+_)?expert_\d+_.*model_states\.pt"), "experts"),
)
# Our names of what is in the files of the first and the last layers.
_ENDS = {
    "word_embeddings.weight": WORD_EMBEDDING,
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "weight": "decoder.final_layernorm.weight",
    "bias": "decoder.final_layernorm.bias",
    "lm_head.weight": OUTPUT_LAYER,
}


def deepspeed_import(
    source: Path,
    target: Path,
    *,
    args_file: Path | None = None,
    tokenizer: bool = True,
    vocab_size: int | None = None,
    optimizer: bool = True,
    ignored: Collection[str] = (),
) -> str:
    """Make a run directory of a checkpoint, with its `optimizer` where ZeRO's files are there; see
    `megatron_import`. Returns what to say of it."""
    return megatron_import(
        checkpoint_folder(source),
        target,
        args_file=args_file,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        ignored=ignored,
        kind=partial(DeepSpeedCheckpoint, with_optimizer=optimizer),
    )


def checkpoint_folder(source: Path) -> Path:
    """The checkpoint's folder, of itself or of a run directory."""
    latest = source / LATEST
    if latest.is_file():
        word = read_text(path_inside(source, LATEST), errors="replace").strip()
        safe_name(word, latest)
        return path_inside(source, word)
    return source


class DeepSpeedCheckpoint(MegatronCheckpoint):
    """An open checkpoint of Megatron-DeepSpeed."""

    kind = "deepspeed"

    def __init__(self, source: Path, with_optimizer: bool = True):
        self.source = source
        names = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
        for pattern, feature in _REFUSED:
            wrong = next((name for name in names if pattern.fullmatch(name)), None)
            if wrong:
                raise ConversionError(f"{source / wrong}: checkpoints with {feature} are not read")
        ranks = {int(m[1]): m[0] for name in names if (m := _RANK.fullmatch(name))}
        layers = {(int(m[1]), int(m[2])): m[0] for name in names if (m := _LAYER.fullmatch(name))}
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            raise ConversionError(
                f"{source}: has mp_rank_XX_model_states.pt of {sorted(ranks) or 'no rank'}, should "
                "be 0, 1, 2, ..."
            )
        opened = read_all({m: source / name for m, name in ranks.items()}, ("module.",))
        self._read_args(opened[0])
        self._root = opened[0].values
        self._names: dict[str, str] = {}  # ours by those of ZeRO's files
        if layers:
            self.parts = {}
            self.copies = {}
            self.tp = 1 + max(tp for _, tp in layers)
            self.pp = max(1, len(ranks) // self.tp)
            self._sort_layers(layers)
        else:
            self._open({(m, 0): file for m, file in opened.items()})
            self._names = {
                part.path.removeprefix("module."): name
                for name, parts in self.parts.items()
                for part in parts
            }
        self._zero = ZeroOptimizer.open(source, self.tp, self.pp) if with_optimizer else None

    @property
    def layout(self) -> str:
        """What it is, for the report."""
        ranks = f"{self.tp} tensor x {self.pp} pipeline ranks"
        state = self.state
        if state is None:
            return f"{ranks}; weights only, without the optimizer's state"
        return f"{ranks} with the optimizer's state, iteration {state.iteration}"

    @property
    def state(self) -> RunState | None:
        """Counters of the run, if its optimizer is converted."""
        return self._zero.run_state(self._root, self.args) if self._zero else None

    def optimizer(
        self,
        table: Mapping[str, ParameterSpec],
        model: ModelConfig,
        weights: Sequence[Entry],
    ) -> list[Entry]:
        """The optimizer's tensors under our names, or none."""
        if self._zero is None:
            return []
        by_name = {weight.key: weight for weight in weights}
        return optimizer_entries(self._zero.tensors(table, self._names, by_name), table, by_name)

    def _chunks(self, tp: int):
        paths = self.files[tp, 0].tensors
        our_names = [(path, our_name(path)) for path in paths]
        yield 0, [(path, name) for path, name in our_names if name is not None]

    def _sort_layers(self, layers: Mapping[tuple[int, int], str]) -> None:
        """Note where the tensors of the files of layers are; their numbers count from the
        embedding on, with gaps."""
        files = read_all({key: self.source / name for key, name in sorted(layers.items())})
        blocks = {
            number
            for (number, _), file in files.items()
            if any(path.startswith("input_layernorm.") for path in file.tensors)
        }
        numbers = sorted(blocks)
        for (number, tp), file in files.items():
            prefix = ""
            if number in numbers:
                prefix = f"language_model.encoder.layers.{numbers.index(number)}."
            for path, part in file.tensors.items():
                name = our_name(prefix + path) if prefix else _ENDS.get(path, path)
                if name is None:
                    continue
                self._names[f"{number}.{path}"] = name
                if name.startswith("embedding."):
                    self._names[f"tied_modules.embed.{path}"] = name
                stored = self.parts.setdefault(name, [])
                if len(stored) > tp:  # the last stage's copy of a tied embedding
                    stored = self.copies.setdefault(name, [])
                stored.append(part)
