"""Flags of torchvision, timm, PyTorch's ImageNet example, FFCV, Lightning and Hugging Face, and what jaxdp has instead.

The site of the manual lists them on the page of docs/coming_from.md.
"""

import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

from jaxdp.choices import SOURCES
from jaxdp.metrics import METRICS, PREFIX


def _depth(name: str) -> str | None:
    """18 of resnet18 or resnet18.a1_in1k, with flags for timm's resnet50c and resnet18d."""
    match = re.fullmatch(r"resnet(\d+)([cd])?(\..*)?", name)
    if not match:
        return None
    depth, form = match.groups()[:2]
    stem = " --model.stem deep" * bool(form) + " --model.shortcut pooled" * (form == "d")
    return f"{depth}{stem}"


def _schedule(name: str) -> str | None:
    match = re.match("cosine|polynomial", name)
    return match and match[0]


def _source(name: str) -> str | None:
    known = name.startswith("tfds/") or name in SOURCES
    return name.removeprefix("tfds/") if known else None


def _dtype(name: str) -> str:
    return f"{name} --optimizer.loss-scale dynamic" if name == "float16" else name


def _ratio(text: str) -> str | None:
    return text if re.fullmatch(r"0?\.\d+|1(\.0*)?", text) else None


def _metric(name: str) -> str | None:
    """The metric of names such as accuracy, val_acc, top1 and eval_loss."""
    bare = re.sub("^(eval|val|valid|test)[_/]", "", name).lower()
    metric = PREFIX + {"acc": "accuracy", "top1": "accuracy"}.get(bare, bare)
    return metric if metric in METRICS.builtin else None


def _policy(text: str) -> str | None:
    """The flags of torchvision's ra and ta_wide, and of timm's policies rand-m7-mstd0.5-inc1-n2 in any order."""
    if name := {"ra": "rand_augment", "ta_wide": "trivial_augment"}.get(text):
        return name
    parts = {match[1]: match[2] for match in re.finditer(r"-(m|mstd|inc|n)([\d.]+)(?=-|$)", text)}
    whole = "rand" + "".join(f"-{name}{value}" for name, value in parts.items())
    if whole != text or parts.pop("inc", None) != "1" or parts.pop("mstd", None) != "0.5" or parts.pop("n", "2") != "2":
        return None
    return f"rand_augment_increasing --augment.magnitude {parts.get('m', '10')}"  # timm's default


class Counterpart(NamedTuple):
    """The flag with the purpose of another trainer's flag.

    note: how it differs. example: a value. form: flags with {} for the value; "": `flag {}`. convert: the value of the other
    trainer's as jaxdp's; None: there is none. command: that takes the flag and starts the program. trains: whether it is the
    counterpart only where a run is trained.
    """

    flag: str
    note: str = ""
    example: str = ""
    form: str = ""
    convert: Callable[[str], str | None] = str
    command: str = ""
    trains: bool = False

    @property
    def spelled(self) -> str:
        """The flag, after its command."""
        return f"{self.command} {self.flag}".lstrip()

    def hint(self, values: list[str], program: str, is_valid: Callable[[list[str]], bool]) -> str:
        """What to use in place of the other trainer's flag with these values. is_valid: whether flags can be parsed."""
        form = self.form or f"{self.flag} {{}}"
        try:
            value = self.convert(shlex.join(values))
        except ValueError:
            value = None
        is_usable = ("{}" not in form or value) and is_valid(shlex.split(form.format(value)))
        starts_program = self.command not in ("", program)
        whole = f"{self.command} {form} -- {program}" if starts_program else form
        flags = whole.format(value)
        if not is_usable:
            example = f", for example {whole.format(self.example)}" if self.example else ""
            flags = (self.spelled if starts_program else self.flag) + example
        return f"did you mean {flags}{f' ({self.note})' if self.note else ''}?"


_RATE, _DTYPE, _MIX = "--schedule.learning-rate", "--model.dtype", "--data.mix"
_STEPS = "of the schedules goyal and sony_b"
_ONE_MIX = "mixup, cutmix or mixup_or_cutmix"
_ROWS = {
    "lr base-lr": Counterpart(_RATE),
    "lr-base": Counterpart(_RATE, "for the schedule goyal, the rate at a batch of 256, scaled linearly"),
    "sched lr-scheduler lr-scheduler-type scheduler": Counterpart(
        "--schedule.name", "cosine, polynomial, goyal (steps)", "goyal", convert=_schedule
    ),
    "warmup lr-warmup-epochs": Counterpart("--schedule.warmup-epochs", "per step, linear"),
    "warmup-ratio": Counterpart("--schedule.warmup-epochs", "the ratio times --epochs", "5", convert=lambda _: None),
    "warmup-lr": Counterpart("--schedule.start"),
    "min-lr lr-min": Counterpart("--schedule.end"),
    "decay-milestones milestones": Counterpart("--schedule.boundaries", f"epochs; {_STEPS}"),
    "decay-rate lr-gamma gamma": Counterpart("--schedule.factor", _STEPS),
    "num-epochs max-epochs num-train-epochs": Counterpart("--epochs", "scales warm-up and boundaries in proportion"),
    "opt optim optimizer": Counterpart("--optimizer.name", "--help optimizer lists jaxdp's", "sgd"),
    "wd": Counterpart("--optimizer.weight-decay", "not of biases and normalization"),
    "adam-beta1": Counterpart("--optimizer.momentum"),
    "adam-beta2": Counterpart("--optimizer.beta2"),
    "opt-betas": Counterpart(
        "--optimizer.beta2",
        "the first one is --optimizer.momentum",
        "0.98",
        form="--optimizer.name adamw --optimizer.beta2 {}",
        convert=lambda _: None,
    ),
    "smoothing label-smoothing-factor": Counterpart("--optimizer.label-smoothing", "timm's default is 0.1"),
    "finetune-head-multiplier": Counterpart("--optimizer.groups", "", "fc:rate=10", form="--optimizer.groups fc:rate={}"),
    "norm-weight-decay bias-weight-decay": Counterpart(
        "--optimizer.groups", "a factor on weight decay", "bias|scale:decay=0", convert=lambda _: None
    ),
    "class-weights": Counterpart("--optimizer.class-weights", "a number for each class, or balanced"),
    "criterion": Counterpart("--optimizer.loss", "softmax or binary", "softmax"),
    "bce-loss": Counterpart("--optimizer.loss", form="--optimizer.loss binary"),
    "bce-target-thresh": Counterpart("--optimizer.target-threshold"),
    "clip-grad clip-grad-norm max-grad-norm gradient-clip-val": Counterpart("--optimizer.clip-norm"),
    "model-ema model-ema-decay ema ema-decay": Counterpart(
        "--optimizer.average-decay", "the decay of each step; --optimizer.average-start initial is timm's", "0.9999"
    ),
    "model-ema-warmup": Counterpart(
        "--optimizer.average-start", form="--optimizer.average-start warmup --optimizer.average-decay 0.9999"
    ),
    "per-device-train-batch-size": Counterpart(
        "--batch.0.global-batch", "the batch of all devices together", "256", convert=lambda _: None
    ),
    "-b batch batch-size": Counterpart(
        "--batch.0.global-batch", "the batch of all GPUs together; a second phase has --batch.1.global-batch"
    ),
    "val-interval check-val-every-n-epoch": Counterpart("--evaluation.every-epochs"),
    "-a arch model": Counterpart("--model.depth", "18, 34, 50, 101, 152; other models with --model.name", "50", convert=_depth),
    "num-classes num-labels": Counterpart("--model.classes", "follows from the data"),
    "amp bf16": Counterpart(_DTYPE, form=f"{_DTYPE} bfloat16"),
    "fp16": Counterpart(_DTYPE, form=f"{_DTYPE} float16 --optimizer.loss-scale dynamic"),
    "amp-dtype precision": Counterpart(_DTYPE, "", "bfloat16", convert=_dtype),
    "sync-bn sync-batchnorm": Counterpart("--model.norm", form="--model.norm synchronized"),
    "bn-momentum": Counterpart(
        "--model.norm-momentum", "PyTorch's 0.1 is 0.9 here", "0.9", convert=lambda value: f"{1 - float(value):.6g}"
    ),
    "drop-path drop-connect": Counterpart(
        "--model.drop-path", "of the last block; 0 for the first, as in timm's ResNets", "0.1"
    ),
    "use-blurpool": Counterpart(
        "--model.blur-pool", "FFCV's form; Composer's is convolutions_and_pool", form="--model.blur-pool convolutions"
    ),
    "grad-checkpointing gradient-checkpointing": Counterpart("--model.remat", form="--model.remat"),
    "pretrained-path initial-checkpoint": Counterpart("--finetune.weights", "a safetensors file"),
    "freeze": Counterpart("--finetune.frozen-stages", "1 the stem, 2 also the first stage, ... 5 all but the classifier"),
    "dataset": Counterpart("--data.source", "folder, or a name of tensorflow-datasets", "imagenet2012", convert=_source),
    "data data-dir data-path train-dir": Counterpart(
        "--data.directory", "folder: images in SPLIT/CLASS/", "pets", form="--data.directory {} --data.source folder"
    ),
    "val-split": Counterpart("--data.eval-split"),
    "train-val-split validation-split": Counterpart("--data.holdout", "a share of data without held-out images"),
    "img-size train-crop-size": Counterpart("--data.image-size"),
    "val-crop-size": Counterpart("--data.eval-size"),
    "val-resize-size": Counterpart("--data.eval-resize"),
    "crop-pct": Counterpart("--data.eval-resize", "", "0.95", convert=_ratio),
    "interpolation": Counterpart("--data.eval-interpolation", "of evaluation", "bicubic"),
    "-j workers num-workers dataloader-num-workers": Counterpart("--data.threads", "threads of a process; default: all cores"),
    "mixup mixup-alpha": Counterpart(_MIX, _ONE_MIX, "0.2", form=f"{_MIX} mixup --data.mix-alpha {{}}"),
    "cutmix cutmix-alpha": Counterpart(_MIX, _ONE_MIX, "1.0", form=f"{_MIX} cutmix --data.mix-alpha {{}}"),
    "aa auto-augment": Counterpart(
        "--data.auto-augment", "see docs/data.md; no AutoAugment, no AugMix: register your own", "rand_augment", convert=_policy
    ),
    "ra-magnitude": Counterpart("--augment.magnitude", "of rand_augment and rand_augment_increasing"),
    "color-jitter": Counterpart(
        "--augment.color-jitter", "brightness, contrast, saturation, hue", "0.4", form="--augment.color-jitter {0} {0} {0}"
    ),
    "reprob random-erase": Counterpart("--augment.erase-probability"),
    "aug-repeats ra-reps": Counterpart("--data.repeats", "see docs/data.md for the order"),
    "ra-sampler": Counterpart("--data.repeats", "torchvision's default is 3", "2"),
    "train-interpolation": Counterpart("--augment.crop-interpolation", "of random_resized_crop", "random"),
    "scale": Counterpart("--augment.min-area", "smallest area of a random crop, of random_resized_crop"),
    "hflip": Counterpart("--augment.flip", "probability one half, or --augment.no-flip", form="--augment.flip"),
    "output output-dir save-dir default-root-dir": Counterpart("--workdir", trains=True),  # other commands read a run there
    "-n nproc-per-node": Counterpart("--processes", "", "2", command="jaxdp launch"),
    "experiment run-name": Counterpart("--name"),
    "data-seed seed-everything": Counterpart("--seed"),
    "checkpoint-hist save-total-limit": Counterpart("--checkpoint.keep", "besides the best one"),
    "resume-from-checkpoint ckpt-path": Counterpart(
        "--resume", "omit it to continue: the same command resumes a run", trains=True
    ),
    "eval-metric metric-for-best-model monitor": Counterpart("--stop.metric", "", "eval_accuracy", convert=_metric),
    "patience early-stopping early-stopping-patience": Counterpart(
        "--stop.patience", "evaluations without a better --stop.metric", "5"
    ),
    "log-interval print-freq logging-steps log-every-n-steps": Counterpart(
        "--logging.every-steps", "of metrics.jsonl; a line is printed every 15 s"
    ),
    "wandb log-wandb wandb-project": Counterpart("--logging.wandb", "takes the project", "digits"),
    "use-deterministic-algorithms full-determinism": Counterpart("--compile.deterministic", form="--compile.deterministic"),
}
# Name without the leading -- (a short flag with its dash).
COUNTERPARTS = {name: counterpart for names, counterpart in _ROWS.items() for name in names.split()}

_EVALUATION_BATCH = "not needed: a run evaluates as many images at a time as it trains on, other commands 64 on each device"
_OWN_SCHEDULE = "register a schedule (docs/extending.md)"
_NO_ROWS = {
    "opt-eps adam-epsilon": (
        "it is 1e-8 in adamw and 1e-6 in lamb; for another value register the optimizer (docs/extending.md)"
    ),
    "validation-batch-size val-batch-size eval-batch-size evaluation-batch-size per-device-eval-batch-size": _EVALUATION_BATCH,
    "clip-mode gradient-clip-algorithm": (
        "--optimizer.clip-norm clips by the norm of all gradients; for clipping by value see docs/experiments.md"
    ),
    "tta": "use jaxdp evaluate --flip, the mean over an image and its mirror image",
    "drop dropout": "the built-in ResNet has none; a registered model may",
    "device devices gpu gpus accelerator no-cuda use-cpu": (
        "a run uses all GPUs that it sees; CUDA_VISIBLE_DEVICES selects them; plan takes --devices"
    ),
    "ddp find-unused-parameters ddp-find-unused-parameters fsdp deepspeed": (
        "not needed: a run is always data-parallel, on all GPUs that it sees"
    ),
    "local-rank world-size num-nodes dist-url dist-backend ddp-backend multiprocessing-distributed": (
        "jaxdp reads the launcher's variables; see docs/clusters.md"
    ),
    "grad-accum grad-accumulation accumulate-grad-batches grad-accum-steps gradient-accumulation-steps": (
        "devices accumulate if --batch.0.global-batch exceeds devices x --batch.0.per-worker-batch"
    ),
    "torchcompile torch-compile torchscript fuser channels-last": "not needed: the step is compiled, with channels last",
    "pretrained": "give a weight file with --finetune.weights; jaxdp downloads none",
    "test-only evaluate eval eval-only": "use jaxdp evaluate",
    "dry-run fast-dev-run": "use jaxdp plan",
    "memory": "jaxdp plan always prints the memory of a run",
    "remode": "jaxdp erases with the mean of the data set, timm's const",
    "multi-label": "use --task labels",
    "bce-pos-weight": "use --optimizer.class-weights with --task labels",
    "in-chans": "images have three channels; gray ones are repeated",
    "lr-noise lr-noise-pct lr-noise-std lr-cycle-mul lr-cycle-decay lr-cycle-limit lr-k-decay": _OWN_SCHEDULE,
    "lr-step-size decay-epochs patience-epochs": _OWN_SCHEDULE,
    "cooldown-epochs": "the schedule ends with the run; --schedule.end is its last rate",
    "lr-warmup-method lr-warmup-decay warmup-prefix": "the warm-up is linear, from --schedule.start",
    "lr-base-size lr-base-scale": "scale the rate yourself; --schedule.name goyal scales it linearly from a batch of 256",
    "layer-decay-min-scale layer-decay-no-opt-scale": "--finetune.layer-decay has no least factor",
    "mixup-prob mixup-switch-prob mixup-mode mixup-off-epoch cutmix-minmax": (
        "every step mixes, with one share for each worker's batch; --data.mix mixup_or_cutmix takes one of the two at random"
    ),
    "ratio train-crop-mode": "random crops have aspect ratios from 3/4 to 4/3",
    "recount resplit": "one rectangle of an image is erased",
    "jsd-loss": "register a loss (docs/extending.md)",
    "bce-sum": "use --optimizer.loss binary_sum",
    "drop-block bn-eps gp fast-norm head-init-scale head-init-bias model-kwargs split-bn": (
        "register a model of your own (docs/extending.md); --model.classifier-bias is the initial bias"
    ),
    "opt-kwargs optim-args optim-target-modules": "register an optimizer (docs/extending.md)",
    "dist-bn ddp-broadcast-buffers": "not needed: batch statistics are averaged over all devices in every step",
    "pin-mem no-prefetcher dataloader-pin-memory dataloader-persistent-workers dataloader-prefetch-factor cache-dataset": (
        "not needed: threads decode ahead; small data sets are kept in memory"
    ),
    "drop-last dataloader-drop-last": "not needed: a batch that spans two epochs has images of both",
    "tf32 benchmark backend": "XLA chooses the kernels; --model.dtype bfloat16 is fast on GPUs",
    "dataset-name": "use --data.source with a name of tensorflow-datasets, or file with --data.directory",
    "validation-dir": "--data.directory has train and val; or hold out a share with --data.holdout 0.1",
    "train-val-split": "use --data.holdout 0.1",
    "greater-is-better": "a metric itself says it: jaxdp.register_metric(name, f, higher_is_better=False)",
    "logging-strategy logging-first-step": "use --logging.every-steps",
    "logging-dir": "use --workdir",
    "profiler": "use --logging.profile 10,5",
    "detect-anomaly": "use JAX_DEBUG_NANS=1; --guard.non-finite says what a run does",
    "callbacks": "define callbacks() in a recipe file (docs/extending.md)",
    "enable-checkpointing": "a run always saves; --checkpoint.every-epochs and --checkpoint.keep say how often",
    "model-ema-steps": "parameters are averaged after every step; use --optimizer.average-decay",
    "model-name-or-path": "use --model.depth, or --finetune.weights with a safetensors file",
    "worker-seeding": "random numbers follow --seed and the position of an image",
    "kd-model-name kd-loss-type kd-temperature kd-alpha": "register a task with a teacher (docs/tasks.md)",
    "sched-on-updates": "not needed: the rate changes at every step",
    "vflip no-aug color-jitter-prob grayscale-prob gaussian-blur-prob aug-splits augmix-severity": (
        "register an augmentation (docs/extending.md), or choose one with --data.augmentation"
    ),
    "do-train do-eval do-predict": "use jaxdp train, jaxdp evaluate, jaxdp predict",
    "eval-strategy evaluation-strategy eval-steps val-check-interval": "use --evaluation.every-epochs, which may be a fraction",
    "save-strategy save-steps": "use --checkpoint.every-epochs or --checkpoint.every-minutes",
    "load-best-model-at-end": "jaxdp keeps the best checkpoint; evaluate, predict and export take --checkpoint best",
    "report-to logger": "use --logging.wandb or --logging.mlflow; TensorBoard is always written",
    "push-to-hub": "use jaxdp export, whose directory huggingface_hub uploads",
    "limit-train-batches limit-val-batches overfit-batches max-train-samples max-eval-samples": (
        "use a slice of the data, such as --data.train-split train[:10%] of tensorflow-datasets"
    ),
    "quiet disable-tqdm enable-progress-bar": (
        "redirect the output, as in > log.txt; in Python with contextlib.redirect_stdout(io.StringIO())"
    ),
    "warmup-steps": "give it with --schedule.warmup-epochs, which may be a fraction",
    "max-steps": "give the length with --epochs, which may be a fraction",
    "no-resume": "use --resume never",
    "max-time": "send SIGTERM, as `timeout 8h jaxdp train` does: the run saves and can be resumed",
    "overwrite-output-dir": "use --resume never, which takes a new directory",
    "start-epoch": "the same command resumes a run where it stopped",
}
# Name -> what to do instead, for flags that have no flag of the same purpose.
NO_COUNTERPART = {name: advice for names, advice in _NO_ROWS.items() for name in names.split()}
# Program -> names that have none there.
NO_COUNTERPART_IN = {"jaxdp evaluate": dict.fromkeys(("-b", "batch", "batch-size"), _EVALUATION_BATCH)}
