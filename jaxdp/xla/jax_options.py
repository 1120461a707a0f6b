"""JAX's global options: the programs of jaxdp compute the same, whatever the environment or the caller has set."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxdp.errors import ConfigError

# Options that change results or forbid what a run needs, with their values in jaxdp's programs. JAX has a context manager for
# each, which sets it for one thread, so that the caller's own programs keep theirs. Debugging (`jax_debug_nans`) is the user's.
OWN: dict[str, Any] = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_enable_custom_prng": False,
    "jax_legacy_prng_key": "allow",
    "jax_softmax_custom_jvp": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_default_device": None,
    "jax_thread_guard": False,
    "jax_transfer_guard": "allow",
    "jax_transfer_guard_host_to_device": "allow",
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
}
# Options of that kind without a context manager, with JAX's defaults.
REFUSED: dict[str, Any] = {
    "jax_random_seed_offset": 0,
    "jax_disable_most_optimizations": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
}


@contextmanager
def jaxdp_jax_config() -> Iterator[dict[str, Any]]:
    """Set the options `OWN` for this thread; also a decorator. Yields what `set_aside` returned before.

    Needed by every function that traces or runs a program, in every thread that does.
    """
    import jax

    others = set_aside()
    with ExitStack() as stack:
        for name in others:
            stack.enter_context(getattr(jax, name.removeprefix("jax_"))(OWN[name]))
        yield others


def set_aside() -> dict[str, Any]:
    """The options that the environment or the caller has set otherwise than `OWN`, with their values."""
    return _others(OWN)


def describe(without_effect: dict[str, Any]) -> str:
    """A line on options that `jaxdp_jax_config` sets aside."""
    words = ", ".join(f"{name}={value}" for name, value in without_effect.items())
    return f"these options of JAX have no effect on a run: {words}"


def check() -> None:
    """Raise ConfigError if an option of `REFUSED` is set."""
    for name, value in _others(REFUSED).items():
        hint = f"use {REFUSED[name]!r}, JAX's default"
        raise ConfigError(name, value, reason="this option of JAX changes or breaks a run", hint=hint)


def _others(options: dict[str, Any]) -> dict[str, Any]:
    """The options that have other values than these; a release of JAX may lack some."""
    import jax

    values = {name: jax.config.values.get(name) for name in options}
    return {name: value for name, value in values.items() if value not in (None, options[name])}
