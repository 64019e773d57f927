"""The last part of docs/families.md: which exports of a family were compared with transformers."""

from __future__ import annotations

from typing import Any

from tests.forkrun import ROOT
from tools.convert.families import PLAIN

PAGE = ROOT / "docs/families.md"
EXPORTS_HEAD = "\n## Exports compared\n"
TEXT = """
Without transformers, `hf-export` writes what this table has: for each family, the values of each feature that its models in the
test had (float32, 3 layers, logits within 1e-4 of the largest; other numbers than the defaults for base, epsilon, multipliers), and
every pair of them. `number` is any number, `null` none; features with one value in all families are omitted. internlm, internlm2 and
internlm3 were compared as the Llama models that they are. `python -m tests.tools.convert.test_verified_exports` writes this table and
tools/convert/verified_exports.json.

"""


def exports_page(table: dict[str, Any]) -> str:
    """The heading and the table: a row for each family."""
    families = table["families"]
    values = {
        name: {
            family: entry["features"].get(name, [PLAIN[name]]) for family, entry in families.items()
        }
        for name in PLAIN
    }
    columns = [name for name in PLAIN if any(len(of) > 1 for of in values[name].values())]
    rows = [["family", *(f"`{name}`" for name in columns)], ["---"] * (len(columns) + 1)]
    for family in sorted(families):
        rows.append([family, *(", ".join(map(_word, values[name][family])) for name in columns)])
    return EXPORTS_HEAD + TEXT + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _word(value: Any) -> str:
    if isinstance(value, list):  # biases of queries, keys and values, of the output, of the MLP
        names = [name for name, on in zip(("qkv", "output", "mlp"), value, strict=False) if on]
        return "+".join(names) or "none"
    return {"None": "null", "True": "yes", "False": "no"}.get(str(value), str(value))
