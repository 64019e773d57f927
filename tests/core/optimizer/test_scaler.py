"""Loss scales against a trace written by hand from Megatron's rules."""

import json

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler
from tests.core.optimizer.builders import dynamic_scaler

G = False
INF = True

# step, scale after it, growth tracker, hysteresis tracker; window 3, hysteresis 2, start 2**32,
# floor 2**29
TRACE = [
    (INF, 2.0**32, 0, 1),  # the first overflow is tolerated
    (INF, 2.0**31, 0, 0),  # the second halves
    # hysteresis is not replenished by a backoff: every further one halves at once
    (INF, 2.0**30, 0, -1),
    (G, 2.0**30, 1, -1),
    (G, 2.0**30, 2, -1),
    (INF, 2.0**29, 0, -2),  # an overflow restarts the window
    (INF, 2.0**29, 0, -3),  # not below the minimum
    (G, 2.0**29, 1, -3),
    (G, 2.0**29, 2, -3),
    (G, 2.0**30, 0, 2),  # a full window grows the scale and replenishes hysteresis
    (INF, 2.0**30, 0, 1),
    (G, 2.0**30, 1, 1),
    (G, 2.0**30, 2, 1),
    (G, 2.0**31, 0, 2),
    (INF, 2.0**31, 0, 1),
    (INF, 2.0**30, 0, 0),
]


def test_dynamic_scale_follows_the_trace():
    scaler = dynamic_scaler(2.0**32, min_loss_scale=2.0**29, loss_scale_window=3, hysteresis=2)
    for number, (found_inf, scale, growth, hysteresis) in enumerate(TRACE):
        scaler.update(found_inf)
        got = (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker)
        assert got == (scale, growth, hysteresis), f"step {number}"


def test_state_goes_through_json_and_continues_the_trace():
    for cut in range(len(TRACE)):
        first = dynamic_scaler(2.0**32, min_loss_scale=2.0**29, loss_scale_window=3, hysteresis=2)
        for row in TRACE[:cut]:
            first.update(row[0])
        second = dynamic_scaler(2.0**16, min_loss_scale=2.0**10, loss_scale_window=3, hysteresis=2)
        second.min_scale = 2.0**29
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for row in TRACE[cut:]:
            second.update(row[0])
        assert second.state_dict() == {
            "scale": 2.0**30,
            "growth_tracker": 0,
            "hysteresis_tracker": 0,
        }


def test_defaults_are_megatrons():
    scaler = build_grad_scaler(PrecisionConfig(fp16=True))
    assert isinstance(scaler, DynamicGradScaler)
    assert (scaler.scale, scaler.min_scale, scaler.growth_interval, scaler.hysteresis) == (
        4294967296.0,
        1.0,
        1000,
        2,
    )
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 2.0**33


def test_constant_scale_never_moves():
    scaler = build_grad_scaler(PrecisionConfig(fp16=True, loss_scale=1024))
    assert isinstance(scaler, ConstantGradScaler)
    for found_inf in (INF, INF, INF, G):
        scaler.update(found_inf)
    scaler.load_state_dict({"scale": 7.0})
    assert scaler.scale == 1024.0


def test_only_fp16_or_a_given_scale_has_a_scaler():
    assert build_grad_scaler(PrecisionConfig()) is None
    assert build_grad_scaler(PrecisionConfig(loss_scale=8.0)).scale == 8.0
