"""The text of a checkpoint's `args` file, which `saved_flags` reads."""

import json
from collections.abc import Sequence

from megatron.arguments import (
    flags_of,
    to_args_text,
    values_of,
)
from megatron.config.tree import Config

FEATURES = "# flags of features, which change no weights:\n"
OF_SCRIPT = "# flags of the script:\n"
VALUES = "# all values: "


def to_text(config: Config, leave_out: Sequence[str] = (), of_script: Sequence[str] = ()) -> str:
    """The text of the file; `of_script`: flags of a script's own, as typed."""
    values = {name: v for name, v in values_of(config).items() if name not in leave_out}
    core = flags_of(Config).keys()
    text = to_args_text(config, {*leave_out, *(values.keys() - core)})
    of_features = to_args_text(config, {*leave_out, *core}).lstrip()
    if of_features:
        text += FEATURES + of_features
    text += "".join([OF_SCRIPT * bool(of_script), *(f"{flag}\n" for flag in of_script)])
    return f"{text}{VALUES}{json.dumps(values)}\n"
