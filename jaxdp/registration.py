"""Functions with which users register their own parts by name: models, optimizers, losses, schedules, strategies, ..."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxdp.choices import AUTO_AUGMENTS, LOSSES, MODELS, OPTIMIZERS, SOURCES, TASKS, Loss, SourceChoice, TaskChoice, UpdateRule
from jaxdp.config import Config
from jaxdp.errors import ConfigError, kind_of, registered_function
from jaxdp.fields import LARGEST
from jaxdp.metrics import COUNT, METRICS, PREFIX, MetricChoice
from jaxdp.registry import Choice
from jaxdp.schedules import SCHEDULES, Position, Schedule
from jaxdp.strategies import STRATEGIES, Stage, Strategy
from jaxdp.task import Metric, Task

TASK_HINT = 'for example jaxdp.Task(loss=..., targets=numpy.zeros(2, "float32")), or jaxdp.Task(loss=..., like="classes")'

if TYPE_CHECKING:  # registering needs no JAX
    import jax


def _check_function(register: str, name: str, function: object, *, example: str) -> None:
    """Raise ConfigError for something that cannot be called. register: the public function that takes it."""
    if not callable(function):
        hint = f"for example jaxdp.{register}({name!r}, {example})"
        raise ConfigError(register, name, reason=f"{kind_of(function)} cannot be called", hint=hint)


def register_dataset(name: str, factory: Callable) -> None:
    """Register a data set for `Data(source=name)` in this process.

    factory: a function of the config's `data` section that returns (training, evaluation) as the `datasets` argument of
    `jaxdp.train` takes them: arrays (images uint8 [N, H, W, 3], labels [N]), or objects with __len__ and __getitem__ ->
    (image, label). A list `class_names` of such an object names the classes. The function may read `data.directory` and the
    splits, and must return the same data in every process. Resuming or evaluating a run requires the same registration. A
    repeated name replaces the data set; a name of tensorflow-datasets is hidden.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    _check_function("register_dataset", name, factory, example="lambda data: (training, evaluation)")
    SOURCES.register(name, SourceChoice(""), factory)


def register_model(name: str, build: Any) -> None:
    """Register a model for `Model(name=name)` in this process.

    build: one of these; docs/extending.md describes their interface.

    - a function of the model config that returns a flax.linen module, or such a module or its class;
    - a function of (model config, rngs) that returns a flax.nnx module, or such a class;
    - a function of the model config that returns an object with init(key, image_shape) -> (params, batch_stats) and
      apply(params, batch_stats, images, train) -> (logits, moments).

    A module class with a parameter `classes` or `num_classes` receives it, and `dtype` if it takes it, in place of the config.

    images: [B, H, W, 3] float32, normalized. logits: [B, classes]. params: float32 arrays; weight decay applies to those with
    two or more dimensions. Of an object, batch_stats has {"mean", "var"} for each layer of batch normalization, and in training
    moments has {"mean", "square"}: mean and mean square over the worker's batch; both are {} without such layers.
    Resuming or evaluating a run requires the same registration. A repeated name replaces the model.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    if not callable(build):
        reason = f"{kind_of(build)} is no Flax module and cannot be called"
        raise ConfigError("register_model", name, reason=reason, hint=model_hint(name))
    MODELS.register(name, Choice(""), build)


def register_strategy(name: str, *stages: Stage, scatters: bool = False) -> None:
    """Register an all-reduce strategy for `Reduce(strategy=name)` in this process.

    stages: functions from a vector to a vector, applied in order inside `shard_map` over the axes of
    `jaxdp.parallel.mesh.AXES`. Together they turn each device's vector [n] into the sum over all devices, in the first n
    elements. Stages of `jaxdp.parallel.allreduce` can be reused. A repeated name replaces the stages. scatters: after the first
    stage each device has its shard of the row's sum, in the order of the devices of the row, and the last stage gathers the
    shards of a row, so that `reduce.update sharded` may leave it out.
    Raises ConfigError for an invalid or reserved name, and for `scatters` with fewer than two stages.
    """
    if not stages:
        raise ConfigError("register_strategy", name, reason="needs at least one stage")
    for stage in stages:
        if not callable(stage):
            raise ConfigError(name, stage, reason="must be a function")
    if scatters and len(stages) < 2:
        reason = "a strategy that scatters has a first and a last stage"
        raise ConfigError("register_strategy", name, reason=reason, hint="register its stages one by one")
    STRATEGIES.register(name, Strategy("", scatters=scatters), stages)


def register_optimizer(name: str, build: Callable, *, elementwise: bool = False) -> None:
    """Register an optimizer for `Optimizer(name=name)` in this process.

    build: a function of (config.optimizer, learning_rate, momentum) that returns an `optax.GradientTransformation`. It may read
    any field of the config. learning_rate and momentum are traced scalars with the values of the step; the structure of the
    state must not depend on them. Updates are added to the parameters, and must be proportional to the learning rate. Clipping
    of gradients, averaging of weights and the classifier's multiplier apply as to the built-in optimizers. Resuming a run
    requires the same registration. A repeated name replaces the optimizer. elementwise: the update of each value depends on
    this value alone and its history (no norms of tensors), as `reduce.update sharded` requires.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    _check_function("register_optimizer", name, build, example="lambda config, rate, momentum: optax.lion(rate, momentum)")
    OPTIMIZERS.register(name, UpdateRule("", shards=elementwise), build)


def register_loss(name: str, loss: Callable[[Any, Any], Any]) -> None:
    """Register a training loss for `Optimizer(loss=name)` in this process.

    loss: a function of (logits [B, C] float32, targets [B, C] float32) -> [B] float32, the loss of each image, traced by JAX.
    targets: the share of each class in the label: one-hot, or smoothed and mixed as the config says; held-out labels are
    one-hot. The step takes the mean over the global batch. Bind parameters with `functools.partial`; `class_weights` are for
    the softmax loss. Resuming or evaluating a run requires the same registration. A repeated name replaces the loss.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    from jaxdp.losses import of_targets  # needs JAX

    _check_function("register_loss", name, loss, example="lambda logits, targets: ((logits - targets) ** 2).mean(-1)")
    LOSSES.register(name, Loss(""), of_targets(loss))


def register_metric(
    name: str,
    function: Callable[[Any, Any], Any],
    *,
    higher_is_better: bool = True,
    of: Literal["images", "all"] = "images",
    task: str = "classes",
) -> None:
    """Register a metric of held-out images in this process: every evaluation of a run with this task then has `eval_NAME`.

    function: of="images": f(logits [B, C] float32, labels [B] int32) -> [B], the value of each image, bool or a number, traced
    by JAX; the metric is the mean over the held-out images. of="all": the same of all held-out images, as NumPy arrays, -> a
    number, called once in each process. Other tasks have other outputs and targets. `Stop(metric="eval_NAME")` chooses the
    best checkpoint by it. A repeated name replaces the metric.
    Raises ConfigError for an invalid or reserved name, for something that cannot be called, and for another value of `of`.
    """
    TASKS.check(task)
    metric = Metric(function, higher_is_better=higher_is_better, of=of)
    _check_metric(name, metric, task)
    _register_metric(name, metric, task)


def _check_metric(name: str, metric: Metric, task: str) -> None:
    _check_function("register_metric", name, metric.function, example="lambda logits, labels: logits.argmax(-1) == labels")
    field = f"{PREFIX}{name}"
    if field == COUNT or field in METRICS.builtin:
        raise ConfigError("name", name, reason="reserved", hint="choose a different name")
    if field in METRICS.registered and METRICS[field].task != task:
        reason = f"a metric of the task {METRICS[field].task!r}"
        raise ConfigError("name", name, reason=reason, hint="choose a different name")
    if metric.of not in ("images", "all"):
        raise ConfigError("of", metric.of, reason='must be "images" or "all"')


def _register_metric(name: str, metric: Metric, task: str) -> None:
    sign = 1 if metric.higher_is_better else -1
    entry = MetricChoice("", sign=sign, of=metric.of, task=task, title=metric.title, is_share=metric.is_share)
    function = TASKS.implementation(task).metric(metric.function) if TASKS[task].own else metric.function
    METRICS.register(f"{PREFIX}{name}", entry, function)


def register_task(name: str, task: Task) -> None:
    """Register what a run predicts for `Config(task=name)` in this process: targets, loss and metrics.

    The data give (image, target), as arrays or items: see `jaxdp.Task` for targets, outputs and loss. A model with another
    output than one array is a registered one. Resuming or evaluating a run requires the same registration. A repeated name
    replaces the task and its metrics.
    Raises ConfigError for an invalid or reserved name, for a loss that cannot be called, without `targets` or `like`, and as
    `register_metric` does.
    """
    from jaxdp.tasks.own import OwnTask  # needs JAX

    if not isinstance(task, Task):
        raise ConfigError("register_task", name, reason=f"{kind_of(task)} is no jaxdp.Task", hint=TASK_HINT)
    _check_function("register_task", name, task.loss, example="jaxdp.Task(loss=lambda outputs, targets: ..., targets=...)")
    if (task.targets is None) == (task.like == ""):
        reason = "needs `targets`, or `like` in place of them" if task.targets is None else "has `targets` as well as `like`"
        raise ConfigError("register_task", name, reason=reason, hint=TASK_HINT)
    if task.like and task.like not in TASKS.builtin:
        raise ConfigError("like", task.like, reason="must be a built-in task", hint=f"use {' or '.join(TASKS.builtin)}")
    for target in task.targets.values() if isinstance(task.targets, Mapping) else () if task.like else (task.targets,):
        if not (hasattr(target, "shape") and hasattr(target, "dtype") and np.dtype(target.dtype).kind in "iubf"):
            reason = f"must be arrays of numbers, not {kind_of(target)}"
            raise ConfigError("targets", reason=reason, hint="give an array for one image, or a mapping of names to arrays")
    metrics = {metric: each if isinstance(each, Metric) else Metric(each) for metric, each in task.metrics.items()}
    for metric, each in metrics.items():
        _check_metric(metric, each, name)
    TASKS.register(name, TaskChoice("", like=task.like, own=task), OwnTask(name, task))
    for metric in [metric for metric in METRICS.registered if METRICS[metric].task == name]:
        METRICS.remove(metric)
    for metric, each in metrics.items():
        _register_metric(metric, each, name)


def register_schedule(name: str, rate: Callable[[float], Any]) -> None:
    """Register a learning-rate schedule for `Schedule(name=name)` in this process.

    rate: a function of the epoch (samples seen / training images since the schedule began, a Python float) that returns the
    learning rate, a number. It is called on the host before each step, and by `jaxdp plan`, so it must depend on the epoch
    alone; other fields of `Schedule` are not used. Resuming a run requires the same registration. A repeated name replaces the
    schedule.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    _check_function("register_schedule", name, rate, example="lambda epoch: 0.1 * 0.97**epoch")
    SCHEDULES.register(name, Choice(""), lambda schedule, at: _rate_of(rate, schedule, at))


def _rate_of(rate: Callable[[float], Any], schedule: Schedule, at: Position) -> float:
    """The rate of a registered schedule, in float64. Raises ConfigError unless it is a number from 0 to LARGEST."""
    failed, hint = f"the registered function failed at epoch {at.epoch:g}", "return the learning rate, a number"
    with registered_function("schedule.name", schedule.name, hint=hint, what=failed):
        found = float(rate(at.epoch))
    if not 0 <= found <= LARGEST:
        reason = f"the registered function returned {found:g} at epoch {at.epoch:g}; must be from 0 to {LARGEST:g}"
        raise ConfigError("schedule.name", schedule.name, reason=reason, hint=hint)
    return found


def register_augmentation(name: str, change: Callable[[Any, Any], Any]) -> None:
    """Register random operations on the pixels of training images for `Data(auto_augment=name)` in this process.

    change: a function of (image [S, S, 3] float32, from 0 to 1, key) that returns such an image, traced by JAX and mapped over
    the batch on the devices. It acts on the crop, before color jitter and normalization. key: one for each image, which depends
    on the seed and the position of the image in the run alone, so results do not depend on the mesh. Bind parameters with
    `functools.partial`. Resuming a run requires the same registration. A repeated name replaces the function.
    Raises ConfigError for an invalid or reserved name, or for something that cannot be called.
    """
    _check_function("register_augmentation", name, change, example="lambda image, key: 1 - image")
    AUTO_AUGMENTS.register(name, Choice(""), partial(_change_images, name=name, change=change))


def _change_images(images: "jax.Array", keys: "jax.Array", *, name: str, change: Callable[[Any, Any], Any]) -> "jax.Array":
    """The function `change`, registered as `name`, on images [B, S, S, 3]: float32, both on the 0-255 scale. keys: [B].

    Raises ConfigError if the function fails, or returns an image of another shape or dtype.
    """
    import jax
    import jax.numpy as jnp

    images = images.astype(jnp.float32) * jnp.float32(1 / 255)
    hint = "it takes (image [S, S, 3] float32, key) and returns such an image"
    with registered_function("data.auto_augment", name, hint=hint):
        changed = jax.vmap(change)(images, keys)
        shape, dtype = changed.shape[1:], changed.dtype
    if (shape, dtype) != (images.shape[1:], images.dtype):
        reason = f"the registered function returned {dtype} {shape}; must be float32 {images.shape[1:]}, as its image"
        raise ConfigError("data.auto_augment", name, reason=reason, hint="keep shape and dtype of the image")
    return 255 * changed


def check_augmentation(config: Config) -> None:
    """Trace a registered `data.auto_augment` on an image. Raises ConfigError if it fails, or changes shape or dtype."""
    import jax

    name, size = config.data.auto_augment, config.data.image_size
    if name in AUTO_AUGMENTS.registered:
        image = jax.ShapeDtypeStruct((1, size, size, 3), "float32")
        change = AUTO_AUGMENTS.implementation(name)
        jax.eval_shape(lambda image: change(image, jax.random.split(jax.random.key(0), 1)), image)


def model_hint(name: str) -> str:
    """What `register_model` takes, with an example."""
    example = f"jaxdp.register_model({name!r}, lambda config: Net(config.classes))"
    return f"register a Flax module, its class, or a function of (config) or (config, rngs) that returns one: {example}"
