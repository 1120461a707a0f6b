"""A network whose first segments are frozen: its values in NumPy, and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.network import FrozenStages


class Scales:
    """Three segments; each multiplies by its parameter; in training also by 2, by its key, and with moments."""

    segments = (("a",), ("b",), ("c",))

    def split_frozen(self, frozen_stages):
        return self.segments[:frozen_stages], self.segments[frozen_stages:]

    def apply_segment(self, params, batch_stats, x, *, segment, train=True, key=None):
        x = x * params[segment[0]] * batch_stats[segment[0]]
        return (x * 2 * key, {segment[0]: {"mean": x}}) if train else (x, {})


PARAMS, STATS = {"a": 3.0, "b": 5.0, "c": 7.0}, {"a": 1.1, "b": 1.3, "c": 1.7}


@pytest.mark.parametrize("frozen", [1, 2])
@pytest.mark.parametrize("train", [False, True])
def test_frozen_segments_evaluate_without_derivatives_and_the_rest_trains(frozen, train):
    network, image, key = FrozenStages(Scales(), frozen), 0.25, 11.0
    assert network.segments == Scales.segments[frozen:]
    expected, means = np.float64(image), {}
    for index, name in enumerate("abc"):
        expected = expected * PARAMS[name] * STATS[name]
        if train and index >= frozen:
            means[name] = expected
            expected = expected * 2 * key

    def output(params, image):
        return network.apply(params, STATS, image, train=train, key=key)

    out, moments = output(PARAMS, image)
    np.testing.assert_allclose(out, expected)
    assert {name: moment["mean"] for name, moment in moments.items()} == pytest.approx(means)
    slopes, of_image = jax.grad(lambda *inputs: output(*inputs)[0], (0, 1))(PARAMS, jnp.float32(image))
    learned = {name: expected / value * (index >= frozen) for index, (name, value) in enumerate(PARAMS.items())}
    assert slopes == pytest.approx(learned, rel=1e-5)
    assert of_image == 0


def test_segment_alone_is_trained_by_default():
    network = FrozenStages(Scales(), 1)
    for segment, scale in ((("b",), 3 * 1.1 * 5 * 1.3), (("c",), 7 * 1.7)):
        for mode, factor in (({}, 2 * 11), ({"train": False}, 1)):
            out, moments = network.apply_segment(PARAMS, STATS, 0.5, segment=segment, key=11.0, **mode)
            np.testing.assert_allclose(out, 0.5 * scale * factor, rtol=1e-6)
            assert bool(moments) == (not mode)
