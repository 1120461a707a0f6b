"""Registered models as networks: linen modules, nnx modules, and objects with init and apply."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxdp.choices import MODELS
from jaxdp.config import Model as ModelConfig
from jaxdp.errors import ConfigError, Unusable, first_line, kind_of, place_in_user_code, plural
from jaxdp.models.flax_modules import MODE_ARGUMENTS, FlaxNet, LinenNet, NnxNet
from jaxdp.network import ROOT, apply_in_segments
from jaxdp.parallel.mesh import AXES, abstract_mesh
from jaxdp.registration import model_hint

CLASS_COUNTS = ("classes", "num_classes")  # parameters of a module class that takes them in place of the config
CALL_HINT = (
    f"a Flax module is called with images [B, H, W, 3] and its own arguments among {', '.join(MODE_ARGUMENTS)}, its class with "
    "the number of classes if it has a parameter `classes`, else with the model config"
)


class FunctionPair:
    """An object with init and apply, as a single segment, with the methods of `FlaxNet`."""

    segments = ((ROOT,),)

    def __init__(self, net: Any) -> None:
        self.net = net

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        params, batch_stats = self.net.init(key, image_shape)
        return {ROOT: params}, batch_stats

    def apply_segment(
        self, params: dict, batch_stats: dict, x: jax.Array, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, dict]:
        return self.net.apply(params[ROOT], batch_stats, x, train)


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model as a `Network`. name: as registered; classes: number of logits."""

    net: FlaxNet | FunctionPair
    name: str
    classes: int
    draws_for_each_image = False  # random layers of modules draw for a batch

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """Parameter names of each segment, in forward order: one segment, unless a Flax module declares stages."""
        return self.net.segments

    def split_frozen(self, frozen_stages: int) -> tuple[tuple, tuple]:
        """(frozen segments, trainable segments): nothing is frozen, which only a ResNet supports."""
        return (), self.segments

    def trainable(self, tree: dict, frozen_stages: int) -> dict:
        """The trainable part of params or batch_stats: all of it."""
        return tree

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats) as float32 trees; see `jaxdp.register_model`."""
        with _errors_in_one_line(self.name):
            params, batch_stats = self.net.init(key, image_shape)
            return _float32(params), _float32(batch_stats)

    def apply(
        self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """(logits, moments); see `Network.apply`. key: of dropout, in training.

        Raises ConfigError if the model fails, returns logits of a wrong shape, or moments of layers that are not in
        batch_stats.
        """
        return apply_in_segments(self, params, batch_stats, images, train=train, key=key)

    def apply_segment(
        self,
        params: dict,
        batch_stats: dict,
        x: Any,
        *,
        segment: tuple[str, ...],
        train: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[Any, dict]:
        """(output of a segment for its input x, moments). Raises ConfigError as `apply` does."""
        index = self.segments.index(segment)
        with _errors_in_one_line(self.name):
            y, moments = self.net.apply_segment(params, batch_stats, x, index=index, train=train, key=key)
            if index == len(self.segments) - 1:
                y = self._checked_outputs(y, jax.tree.leaves(x)[0].shape[0])
            if not train:
                return y, {}
            expected = batch_stats if len(self.segments) == 1 else {name: batch_stats.get(name, {}) for name in segment}
            if _leaf_names(moments) != (names := _leaf_names(expected, var="square")):
                reason = f"the model returns moments {_leaf_names(moments)}, which do not match its batch_stats"
                raise Unusable(reason, f"return {names} in training")
            return y, moments

    def _checked_outputs(self, outputs: Any, batch: int) -> Any:
        """Outputs as float32: logits [B, classes], or for a registered task a tree of arrays with leading B."""
        leaves = jax.tree.leaves(outputs)
        shapes = [getattr(leaf, "shape", type(leaf).__name__) for leaf in leaves]
        is_logits = self.classes > 1 and hasattr(outputs, "shape")
        if not leaves or (is_logits and shapes != [(batch, self.classes)]) or any(shape[:1] != (batch,) for shape in shapes):
            reason = f"the model returns logits of shape {', '.join(map(str, shapes))} for {plural(batch, 'image')}"
            raise Unusable(reason, f"return [B, classes] = {(batch, self.classes)}")
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), outputs)

    def check_training(self, params: Any, batch_stats: Any, image_shape: tuple[int, int, int], *, images: int = 2) -> None:
        """Trace the model in training mode, so that its errors appear before the run. params, batch_stats: arrays or shapes;
        images: of the only worker."""

        def logits(params: dict, batch_stats: dict, x: jax.Array) -> jax.Array:
            return self.apply(params, batch_stats, x, train=True, key=jax.random.key(0))[0]

        everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
        mapped = jax.shard_map(
            logits, mesh=abstract_mesh(1, 1), in_specs=(everywhere, everywhere, rows), out_specs=rows, check_vma=False
        )
        jax.eval_shape(mapped, params, batch_stats, jax.ShapeDtypeStruct((images, *image_shape), jnp.float32))


def build_registered(config: ModelConfig) -> RegisteredModel:
    """The registered model of a config. Raises ConfigError for something that is no model."""
    classes = config.class_count
    with _errors_in_one_line(config.name, hint=""):
        net = _build_net(config)
    return RegisteredModel(net, config.name, classes)


def _build_net(config: ModelConfig) -> FlaxNet | FunctionPair:
    build = MODELS.implementation(config.name)
    if isinstance(build, nn.Module):
        _check_receives_nothing(config, "a module")
        return LinenNet(build, config.norm)
    if isinstance(build, nnx.Module):
        raise Unusable(
            "an nnx module holds parameters, but a run draws its own", "register its class, or a function of (config, rngs)"
        )
    given, named, takes_rngs = _arguments(build, config)
    if takes_rngs:
        return NnxNet(lambda key: build(*given, **named, rngs=nnx.Rngs(key)), config.norm)
    net = build(*given, **named)
    if isinstance(net, nn.Module):
        return LinenNet(net, config.norm)
    if isinstance(net, nnx.Module):
        raise Unusable(
            "the function that builds the nnx module has no parameter rngs, so its weights do not follow the seed",
            "register a function of (config, rngs)",
        )
    for method in ("init", "apply"):
        if not callable(getattr(net, method, None)):
            reason = f"{kind_of(build)} returns {kind_of(net)}, which is no Flax module and has no method {method!r}"
            raise Unusable(reason, model_hint(config.name))
    return FunctionPair(net)


def _arguments(build: Callable, config: ModelConfig) -> tuple[list, dict[str, Any], bool]:
    """(positional arguments, keyword arguments without rngs, whether it takes rngs) for the registered function.

    A module class with a parameter `classes` or `num_classes` takes it, and `dtype`, in place of the config.
    """
    is_module = inspect.isclass(build) and issubclass(build, (nn.Module, nnx.Module))
    given: list = [config]
    named: dict[str, Any] = {}
    try:
        signature = inspect.signature(build.__init__ if is_module else build)
        takes_rngs = "rngs" in signature.parameters
        if is_module and not {*CLASS_COUNTS}.isdisjoint(signature.parameters):
            values = {**dict.fromkeys(CLASS_COUNTS, config.classes), "dtype": config.dtype}
            given, named = [], {name: value for name, value in values.items() if name in signature.parameters}
        signature.bind(*[build] * is_module, *given, **named, **dict.fromkeys(("rngs",) * takes_rngs))
    except (TypeError, ValueError) as error:
        arguments = ", ".join([*["config"] * len(given), *named])
        raise Unusable(
            f"{kind_of(build)} cannot be called with ({arguments}): {first_line(error)}", model_hint(config.name)
        ) from None
    if not given:
        _check_receives_nothing(config, "a class that takes the number of classes")
    return given, named, takes_rngs


def _check_receives_nothing(config: ModelConfig, registered: str) -> None:
    """Raise ConfigError if a field asks for a change that cannot reach the network. registered: what was registered."""
    for field in ("shortcut", "blur_pool", "drop_path", "classifier_bias"):
        value = getattr(config, field)
        if value != getattr(ModelConfig(), field):
            reason = f"not used: {config.name!r} is registered as {registered}, which does not receive it"
            hint = "omit it, or register a function of (config) that uses it"
            raise ConfigError(f"model.{field}", value, reason=reason, hint=hint)


@contextmanager
def _errors_in_one_line(name: str, hint: str = CALL_HINT) -> Iterator[None]:
    """Turn an error of a registered model into a ConfigError that names its place in the model."""
    try:
        yield
    except ConfigError:
        raise
    except Unusable as error:
        raise ConfigError("model.name", name, reason=error.reason, hint=error.hint) from None
    except Exception as error:
        reason = f"the model fails{place_in_user_code(error)}: {type(error).__name__}: {first_line(error)}"
        raise ConfigError("model.name", name, reason=reason, hint=hint) from error


def _float32(tree: dict) -> dict:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def _leaf_names(tree: dict, **renamed: str) -> list[str]:
    """Sorted paths of a tree's leaves. renamed: replacements for the last component."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    return sorted("/".join([*parents, renamed.get(last, last)]) for *parents, last in (name.split("/") for name in names))
