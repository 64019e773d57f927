"""Numbers that JSON has not."""

import math


def without_nan(value: object) -> object:
    """JSON has no NaN: such numbers are written as strings."""
    if isinstance(value, dict):
        return {key: without_nan(element) for key, element in value.items()}
    if isinstance(value, list):
        return [without_nan(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
