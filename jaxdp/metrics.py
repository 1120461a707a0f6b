"""The metrics of held-out images: their names, signs and formats. Records, reports and best checkpoints follow this table.

An evaluation's record has `eval_NAME` for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxdp.choices import TASKS
from jaxdp.errors import ConfigError, plural, suggest
from jaxdp.registry import Choice, Choices, LazyModule

if TYPE_CHECKING:  # for editors and type checkers
    from jaxdp import label_metrics, losses
else:
    label_metrics = LazyModule("jaxdp.label_metrics")
    losses = LazyModule("jaxdp.losses")

PREFIX = "eval_"  # of the fields of an evaluation's record
LOSS, COUNT = "eval_loss", "eval_examples"  # after the other metrics: the mean loss, and the number of images


@dataclass(frozen=True)
class MetricChoice(Choice):
    """A metric of held-out images. Its implementation is a function; the loss has none.

    of: "images": the function is f(outputs, labels) -> [B], the value of each image, bool or a number, traced by JAX; the
    metric is its mean. "all": the same of all held-out images, as NumPy arrays, -> a number, called once. outputs: of the
    model, such as logits [B, C] float32; labels: as the task's data give them. task: whose evaluations have it; "" for every
    task.
    sign: 1 if higher values are better, -1 if lower ones are. title: for people; "" for its name. is_share: shown in percent.
    least_classes: with fewer, an evaluation lacks it, for the reason `lacking`.
    """

    task: str = "classes"
    sign: int = 1
    of: Literal["images", "all"] = "images"
    title: str = ""
    is_share: bool = False
    least_classes: int = 0
    lacking: str = ""

    def shown(self, value: float | None) -> str:
        """A value for people; "" if there is none."""
        return "" if value is None else f"{100 * value:.2f} %" if self.is_share else f"{value:.4f}"


METRICS = Choices(
    "stop.metric",
    {
        "eval_accuracy": MetricChoice(
            "share of the held-out images whose class is predicted correctly, from 0 to 1",
            title="accuracy",
            is_share=True,
            implementation=lambda: losses.is_correct,
        ),
        "eval_top5": MetricChoice(
            "share whose class is among the five most likely; with six classes or more",
            title="top-5",
            is_share=True,
            least_classes=6,
            lacking="every image is among the five most likely",
            implementation=lambda: losses.is_among_five,
        ),
        "eval_mean_average_precision": MetricChoice(
            "average precision of each class over the held-out images, mean of the classes, from 0 to 1",
            task="labels",
            of="all",
            implementation=lambda: label_metrics.mean_average_precision,
        ),
        "eval_f1_micro": MetricChoice(
            "F1 score of all labels of the held-out images together, at a probability of 0.5",
            task="labels",
            of="all",
            title="F1 micro",
            implementation=lambda: label_metrics.f1_micro,
        ),
        "eval_f1_macro": MetricChoice(
            "F1 score of each class at a probability of 0.5, mean of the classes",
            task="labels",
            of="all",
            title="F1 macro",
            implementation=lambda: label_metrics.f1_macro,
        ),
        LOSS: MetricChoice(
            "mean loss of the held-out images, without label smoothing and class weights; the lower the better",
            task="",
            title="held-out loss",
            sign=-1,
        ),
    },
    other=MetricChoice("or eval_NAME of a name registered with `jaxdp.register_metric`"),
    other_reads="",
    function="register_metric",
)


def bare(name: str) -> str:
    """A metric's name without `eval_`."""
    return name.removeprefix(PREFIX)


def names(task: str | None = None, classes: int | None = None) -> list[str]:
    """The metrics of an evaluation, in the order of its record; the first one describes a run. None: of any task, or number."""
    of_tasks = (None,) if task is None else (task, TASKS[task].like)  # a task's own metrics come first
    found = [name for of in of_tasks for name, entry in METRICS.items() if name != LOSS and of in (None, entry.task)]
    return [*(name for name in found if classes is None or classes >= METRICS[name].least_classes), LOSS]


def first(task: str) -> str:
    """The metric that describes a run of a task."""
    return names(task)[0]


def check_values(name: str, values: Any, images: int) -> None:
    """Raise ConfigError unless a metric of single images has returned the value of each image, [B]."""
    if getattr(values, "shape", None) != (images,):
        given = f"an array of shape {values.shape}" if hasattr(values, "shape") else type(values).__name__
        reason = f"returned {given} for {plural(images, 'image')}"
        raise ConfigError("register_metric", bare(name), reason=reason, hint="return the value of each image, [B]")


def check(name: str) -> None:
    """Raise ConfigError for a value of `stop.metric` that is neither built in nor registered."""
    if name not in METRICS:
        call = f"jaxdp.register_metric({bare(name)!r}, ...)"
        known = suggest(PREFIX + bare(name), METRICS)
        hint = f"{known}, or register it with {call}, or give the recipe that registers it with --config"
        raise ConfigError("stop.metric", name, reason="unknown metric", hint=hint)


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record of the log describes an evaluation, not a training step."""
    return any(name in record for name in METRICS)


def values(record: Mapping[str, Any], task: str) -> dict[str, Any]:
    """NAME -> value of all metrics of a task, without `eval_`; None for those that a record of an evaluation lacks."""
    found = dict.fromkeys(names(task)) | {name: record[name] for name in record if name.startswith(PREFIX) and name != COUNT}
    return {bare(name): value for name, value in found.items()}


def title_of(name: str) -> str:
    """A metric for people, such as "accuracy" for eval_accuracy."""
    return METRICS[name].title or bare(name).replace("_", " ")


def words(record: Mapping[str, Any]) -> list[str]:
    """Title and value of the metrics that a record has, such as "accuracy 93.21 %"."""
    given = [name for name in names() if record.get(name) is not None]
    return [f"{title_of(name)} {METRICS[name].shown(record[name])}" for name in given]
