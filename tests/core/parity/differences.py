"""How far two whole runs of one model are apart."""

from tests.runs import Finished

# rows that pad the vocabulary depend on the layout
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def weight_difference(run: Finished, other: Finished) -> float:
    """The largest difference of a tensor of the last checkpoint, relative to its largest value.
    Rows that pad the vocabulary depend on the layout."""
    found = run.tensors()
    expected = other.tensors()
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, tensor in expected.items():
        rows = 211 if name.endswith(PADDED) else len(tensor)
        change = (found[name][:rows].double() - tensor[:rows].double()).abs().max()
        worst = max(worst, float(change / tensor.double().abs().max().clamp(min=1e-30)))
    return worst


def largest_difference(run: Finished, other: Finished, key: str) -> float:
    """The largest relative difference of a number over all steps."""
    pairs = zip(run.series("iteration", key), other.series("iteration", key), strict=True)
    worst = 0.0
    for (step, a), (other_step, b) in pairs:
        assert step == other_step
        worst = max(worst, abs(a - b) / abs(b))
    return worst
