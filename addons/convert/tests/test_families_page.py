"""The page of the families, docs/families.md, from their table and their rows in the tests.
`python -m megatron.addons.convert.tests.test_families_page` writes it."""

from __future__ import annotations

import json
import re

from megatron.addons.convert.families import FAMILIES, VERIFIED
from megatron.addons.convert.tests.corners import ROWS, Row
from tests.forkrun import ROOT

PAGE = ROOT / "docs/families.md"
HEAD = """# Hugging Face families

Families that transformers contains are compared with it in float32: tiny models of so many configurations as the third column says, with weights,
norms and biases that all matter. Logits differ by less than 1e-5, gradients by less than 1e-4 of each tensor's largest value. Gated delta nets (qwen3_next)
magnify what float32 rounds, so these are compared in float64, and in float32 are as near to that as transformers' own. The model is
exported, too: all tensors are the same bit for bit, and so are transformers' logits; from the imported checkpoint, and for one configuration
and each variant from a checkpoint of 4 ranks (tensor parallelism 2, pipeline parallelism 2; with experts 8 ranks, expert parallelism 2).
For the published models of the last column config.json is read, and the number of parameters is that of transformers' own model.

Where the third column is empty, transformers does not contain the family. internlm and internlm2 are compared with Llama models of the same weights
(addons/internlm/tests/test_huggingface.py), internlm3 (addons/internlm/tests/test_internlm3.py) and Ling 2 (bailing_moe, bailing_moe_v2:
addons/convert/tests/test_ling.py) with their formulas in float64; kimi_k2 is deepseek_v3 by another name.
Which exports with which features were compared: addons/convert/verified_exports.json.

Models of all families train, and generate, at their own context, sliding windows included.

| family | class | configurations | published models |
|---|---|---|---|
"""


def page() -> str:
    """The page, one line a family."""
    lines = []
    for name, family in sorted(FAMILIES.items()):
        row = ROWS.get(name, Row())
        compared = len(row.variants) + len(row.corners) + (not row.flags)
        published = ", ".join(row.published)
        lines.append(f"| {name} | {family.architecture} | {compared or ''} | {published} |\n")
    return HEAD + "".join(lines)


def test_the_page_has_every_family_that_exports_were_compared_of():
    """More than here where an add-on is deleted."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    assert set(page().splitlines()) <= set(text.splitlines())
    named = re.findall(r"^\| (\w+) \| \w+ \|", text.removeprefix(HEAD), re.M)
    assert named == sorted(json.loads(VERIFIED.read_text(encoding="utf-8"))["families"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
