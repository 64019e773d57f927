"""Records what the order of a run's samples depends on, for its checkpoint, and compares two such
records.
"""

from megatron.data.sample_lookup import Dataset

ORDER_FORMAT = 1


def data_order_fingerprint(
    train: Dataset | None,
    valid: Dataset | list[Dataset] | None,
    sampler: dict[str, object] | None = None,
) -> dict[str, object]:
    """Everything the order of training and validation samples depends on, in JSON types, for the
    checkpoint.

    What leaves the order as it was is not in it: paths, and the number of samples as long as it
    changes neither the epochs nor the last epoch's shuffle. Test data is not in it, since every run
    reads it from its start. `sampler` is the sampler's `order()`.
    """
    orders: dict[str, object] = {
        "format": ORDER_FORMAT,
        "sampler": sampler or {"dataloader_type": "single"},
    }
    for name, dataset in (("train", train), ("valid", valid)):
        orders[name] = dataset and (
            [validation_set.order() for validation_set in dataset]
            if isinstance(dataset, list)
            else dataset.order()
        )
    return orders
