"""What a user describes of a target of his own: `jaxdp.Task` and `jaxdp.Metric`."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A metric of held-out images.

    function: with of="images", f(outputs, targets) -> [B], the value of each image, bool or a number, traced by JAX; the metric
    is its mean. With of="all", the same of all held-out images, as NumPy arrays, -> a number, called once in each process.
    outputs: of the model; targets: as the data give them. title: for people; "" for the name. is_share: shown in percent.
    """

    function: Callable[[Any, Any], Any]
    _: KW_ONLY
    higher_is_better: bool = True
    of: Literal["images", "all"] = "images"
    title: str = ""
    is_share: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts for an image, how wrong that is, and how well it does: see `jaxdp.register_task`.

    loss: f(outputs, targets) -> [B] float32, the loss of each image, traced by JAX. outputs: what the model returns, float32
    with leading B: an array or a tree. If the function has a parameter `images`, it gets the images as the model saw them, [B,
    H, W, 3] float32; a parameter `constants` gets `constants`, such as the parameters of a teacher.
    Outputs of one array with as many values as `targets` get its shape, as [B] of a network's [B, 1].
    targets: what the data give for an image: an array, or a mapping of names to arrays, of which only shape and type count;
    float32 or int32 in a batch. like: "classes" or "labels" in place of `targets`: data, metrics and predictions of this task;
    the loss then gets its smoothed and mixed labels, the share of each class [B, C] float32.
    metrics: by name; the first one describes a run and chooses the best checkpoint. outputs: number of values that a model with
    one array returns for an image; default: as many as an array in `targets` has.
    mix: f(targets, others, share [B]) -> targets of images mixed by mixup or CutMix; smooth: f(targets, smoothing) -> targets.
    Without them, these options are refused. show: f(outputs of an image) -> text for people, of NumPy arrays.
    """

    loss: Callable[..., Any]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    targets: Any = None
    like: Literal["", "classes", "labels"] = ""
    outputs: int | None = None
    constants: Any = None
    mix: Callable[[Any, Any, Any], Any] | None = None
    smooth: Callable[[Any, float], Any] | None = None
    show: Callable[[Any], str] | None = None
