"""A command line as the rules see it: values, typed flags and those out of range."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.arguments import Flag, flags_of, values_of
from megatron.config.tree import Config


@dataclass
class Facts:
    """Values by name, what was typed, and which values are out of range."""

    config: Config
    world_size: int
    typed: Collection[str]
    values: dict[str, Any] = field(init=False)
    flags: Mapping[str, Flag] = field(init=False)
    bad: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = values_of(self.config)
        self.flags = flags_of(type(self.config))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def ok(self, *names: str) -> bool:
        """Are all these given and in range, so that a rule may compute with them?"""
        return all(self.values[name] is not None and name not in self.bad for name in names)

    def say(self, name: str) -> str:
        """The flag with its value, as it would be typed."""
        flag = self.flags[name]
        value = self.values[name]
        if flag.kind in ("switch", "off"):
            return flag.spelling
        return f"{flag.spelling} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
