"""Parts of a config in a few words, for tables, logs, plots and model cards."""

from jaxdp.choices import AUTO_AUGMENTS, OPTIMIZERS
from jaxdp.config import Config, Optimizer
from jaxdp.schedules import MOMENTUM_BATCH

HELD_OUT_LABELS = "plain labels"


def training_labels(config: Config) -> str:
    """The labels of the training loss, in a few words. The held-out loss has plain labels, so the two differ in meaning."""
    smoothing, mix = config.optimizer.label_smoothing, config.data.mix
    words = [f"labels smoothed by {smoothing:g}"] * (smoothing > 0)
    words += ["weighted by class"] * bool(config.optimizer.class_weights)
    words += [f"labels mixed by {mix.replace('_', ' ')}"] * (mix != "none")
    if config.optimizer.target_threshold is not None:
        words.append(f"labels above {config.optimizer.target_threshold:g} set to 1, others to 0")
    return ", ".join(words) or HELD_OUT_LABELS


def evaluation_words(config: Config) -> str:
    """How images are evaluated, in a few words: size, resize, filter, and normalization if the config sets it."""
    data, size = config.data, config.data.evaluated_size
    start = f"a short side of {data.evaluation_side}"
    if data.eval_interpolation == "area":
        start = f"the central {data.evaluation_share:.4g} of the short side"
    words = [f"evaluated at {size}x{size} from {start}", data.eval_filter]
    for name, values in (("mean", data.mean), ("std", data.std)):
        words += [f"{name} {' '.join(f'{value:g}' for value in values)}"] * bool(values)
    return ", ".join(words)


def optimizer_words(optimizer: Optimizer) -> str:
    """The optimizer with the fields that its constructor reads, and settings that differ from the defaults.

    Which fields a registered one reads is not known: only those that differ from the defaults.
    """
    words = [f"{optimizer.name}{' with Nesterov momentum' if optimizer.nesterov else ''}"]
    read = {field.removeprefix("optimizer.") for field in OPTIMIZERS.read_fields(optimizer.name)}
    used = sorted({"weight_decay"} | read - {"nesterov"})
    if optimizer.name not in OPTIMIZERS.builtin:
        used = [field for field in used if getattr(optimizer, field) != getattr(Optimizer(), field)]
    words += [f"{field.replace('_', ' ')} {_readable(getattr(optimizer, field))}" for field in used]
    if optimizer.momentum_rule != "constant":
        rule = _readable(optimizer.momentum_rule)
        words.append(f"momentum {optimizer.momentum:g} at batch {MOMENTUM_BATCH} with rule {rule!r}")
    words += ["parameter groups " + " ".join(map(str, optimizer.groups))] * bool(optimizer.groups)
    if optimizer.clip_norm is not None:
        words.append(f"gradients clipped to norm {optimizer.clip_norm:g}")
    if optimizer.average_decay is not None:
        start = "" if optimizer.average_start == "unbiased" else f", start {optimizer.average_start}"
        words.append(f"evaluation of averaged parameters with decay {optimizer.average_decay:g}{start}")
    return ", ".join(words)


def _readable(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value).replace("_", " ")


def policy_words(config: Config) -> list[str]:
    """The random operations on pixels, and repeated augmentation, in a few words each; empty if all are off."""
    data, ranges = config.data, config.augment
    filters = "bilinear or bicubic, at random" if ranges.crop_interpolation == "random" else ranges.crop_interpolation
    words = [f"crops antialiased ({filters})"] * (filters != "unfiltered")
    if data.auto_augment != "none":
        used = [field.removeprefix("augment.") for field in AUTO_AUGMENTS.read_fields(data.auto_augment)]
        values = {name: getattr(ranges, name) for name in used}
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value not in (None, ())]
        words.append(data.auto_augment.replace("_", " ") + (f" ({', '.join(texts)})" if texts else ""))
    if strengths := ranges.jitter_strengths:
        words.append("color jitter (" + ", ".join(f"{name} {value:g}" for name, value in strengths.items()) + ")")
    if ranges.erase_probability:
        words.append(f"erasing (probability {ranges.erase_probability:g})")
    return words + [f"each image {data.repeats} times a batch"] * (data.repeats > 1)


def finetuning_words(config: Config) -> str:
    finetune = config.finetune
    frozen = ["the stem"] * (finetune.frozen_stages > 0)
    frozen += [f"{finetune.frozen_stages - 1} stage{'s' * (finetune.frozen_stages > 2)}"] * (finetune.frozen_stages > 1)
    start = finetune.weights or ("given parameters" if finetune.digest else "random weights")
    until = "" if finetune.unfreeze_epoch is None else f" until epoch {finetune.unfreeze_epoch:g}"
    words = [f"from {start}", f"{' and '.join(frozen)} frozen{until}" if frozen else "nothing frozen"]
    if finetune.layer_decay != 1.0:
        words.append(f"learning rate times {finetune.layer_decay:g} for each layer below the classifier")
    return ", ".join(words)
