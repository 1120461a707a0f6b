"""What is refused of a registered optimizer or loss, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.choices import LOSSES, OPTIMIZERS
from jaxdp.config import Optimizer
from jaxdp.errors import ConfigError
from jaxdp.optim.checks import check_elementwise, check_loss, check_optimizer

PARAMS = {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32), "bias": jax.ShapeDtypeStruct((4,), jnp.float32)}


def per_image(logits, targets):
    return ((logits - targets) ** 2).mean(-1)


LOSS_REASONS = {
    "keeps an axis": (lambda logits, targets: (logits - targets) ** 2, r"returned float32 of shape \(3, 5\) for 3 images"),
    "of classes": (lambda logits, targets: per_image(logits.T, targets.T), r"returned float32 of shape \(5,\) for 3 images"),
    "of 16 bits": (lambda *given: per_image(*given).astype(jnp.bfloat16), r"returned bfloat16 of shape \(3,\) for 3 images"),
    "fails": (lambda logits, targets: logits @ targets, "failed: TypeError: "),
    "no gradient": (lambda *given: jax.lax.while_loop(lambda x: x[0] > 1, lambda x: x / 2, per_image(*given)), "failed: Value"),
}


@pytest.mark.parametrize("case", LOSS_REASONS)
def test_loss_without_a_value_and_gradient_of_each_image_is_refused(case):
    loss, reason = LOSS_REASONS[case]
    jaxdp.register_loss("mine", loss)
    with pytest.raises(ConfigError, match=f"^optimizer.loss='mine': the registered function {reason}"):
        check_loss(Optimizer(loss="mine"), 5)


def test_loss_of_each_image_is_accepted_with_the_number_of_classes_of_the_run():
    seen = []
    jaxdp.register_loss(
        "mine", lambda logits, targets: seen.append((logits.shape, targets.shape)) or per_image(logits, targets)
    )
    check_loss(Optimizer(loss="mine"), 5)
    assert set(seen) == {((3, 5), (3, 5))}
    for name in LOSSES.builtin:
        check_loss(Optimizer(loss=name), 5)


def rule(update, init=lambda params: params):
    return lambda config, rate, momentum: optax.GradientTransformation(init, update)


UPDATE_REASONS = {
    "dtype": (rule(lambda g, s, p: (jax.tree.map(jnp.bfloat16, g), s)), "updates differ from .* has .* dtype bfloat16, not "),
    "shape": (
        rule(lambda g, s, p: (g | {"kernel": g["kernel"].T}, s)),
        r"updates .*: kernel has shape \(4, 3\) .* not \(3, 4\)",
    ),
    "structure": (rule(lambda g, s, p: ([*g.values()], s)), "updates differ from the parameters: another structure"),
    "state's dtype": (
        rule(lambda g, s, p: (g, jax.tree.map(jnp.int32, s))),
        "state differs from .*: 0/bias has .* int32, not ",
    ),
    "state's structure": (rule(lambda g, s, p: (g, (s, s))), "its new state differs from the state of init: another structure"),
    "fails": (rule(lambda g, s, p: 1 / 0), "its update failed: ZeroDivisionError: "),
    "no rule": (lambda config, rate, momentum: 3, "the registered function returned .*; return an optax"),
    "no update": (lambda config, rate, momentum: optax.EmptyState(), "the registered function returned .*; return an optax"),
    "no rule at all": (lambda config, rate, momentum: 1 / 0, "the registered function failed: ZeroDivisionError: "),
}


@pytest.mark.parametrize("case", UPDATE_REASONS)
def test_optimizer_whose_update_or_state_does_not_fit_is_refused(case):
    build, reason = UPDATE_REASONS[case]
    jaxdp.register_optimizer("mine", build)
    with pytest.raises(ConfigError, match=f"^optimizer.name='mine': .*{reason}"):
        check_optimizer(Optimizer(name="mine"), PARAMS)


def by_norm_of_history(after):
    """Momentum whose step number `after`, counted from 0, is divided by the norm of each tensor."""

    def update(updates, state, params=None):
        number, trace = state
        trace = jax.tree.map(lambda g, v: 0.9 * v + g, updates, trace)
        scaled = jax.tree.map(lambda v: -0.1 * v / jnp.where(number == after, jnp.linalg.norm(v), 1.0), trace)
        return scaled, (number + 1, trace)

    return rule(update, lambda params: (jnp.int32(0), jax.tree.map(jnp.zeros_like, params)))


ELEMENTWISE = {
    "momentum": lambda config, rate, momentum: optax.sgd(rate, momentum),
    "decay of matrices": lambda config, rate, momentum: optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)), optax.sgd(rate)
    ),
    "norm in a fourth step": by_norm_of_history(3),
}
COUPLED = {
    **{f"norm in step {step}": by_norm_of_history(step) for step in (0, 2)},
    "mean of vectors": rule(
        lambda g, s, p: (jax.tree.map(lambda x: x - x.mean() if x.ndim == 1 else x, g), s), lambda params: ()
    ),
    "length of matrices": rule(
        lambda g, s, p: (jax.tree.map(lambda x: x * (1 + 1e-3 * x.shape[-1]) if x.ndim > 1 else x, g), s), lambda params: ()
    ),
    "order": rule(lambda g, s, p: (jax.tree.map(lambda x: x[..., ::-1], g), s), lambda params: ()),
}


@pytest.mark.parametrize("case", [*ELEMENTWISE, *COUPLED])
def test_update_that_depends_on_other_values_of_a_tensor_is_not_elementwise(case):
    jaxdp.register_optimizer("mine", (ELEMENTWISE | COUPLED)[case], elementwise=True)
    config = Optimizer(name="mine", clip_norm=1e-3)  # a norm, which the step takes over all shards
    check_optimizer(config, PARAMS)
    if case in ELEMENTWISE:
        check_elementwise(config)
        return
    with pytest.raises(ConfigError, match=r"^optimizer.name='mine': not elementwise: the update of a part"):
        check_elementwise(config)


def test_update_that_fails_for_a_part_of_a_tensor_is_refused_and_built_in_ones_are_not_tried():
    whole = {"matrix": 8, "vector": 6}

    def update(updates, state, params=None):
        return {
            name: updates[name].reshape(-1, size // 2, 2).reshape(updates[name].shape) for name, size in whole.items()
        }, state

    jaxdp.register_optimizer("mine", rule(update))
    with pytest.raises(
        ConfigError, match=r"the update of a part of each tensor failed: TypeError: .*; register it without elem"
    ):
        check_elementwise(Optimizer(name="mine"))
    for name in OPTIMIZERS.builtin:
        check_elementwise(Optimizer(name=name))
        check_optimizer(Optimizer(name=name), np.zeros(3))
