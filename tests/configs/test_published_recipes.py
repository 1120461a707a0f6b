"""Every published recipe against the figures of its source."""

import ast
import dataclasses
import inspect
import json
import math
import re

import numpy as np
import pytest

from jaxdp import published
from jaxdp.data import sources
from jaxdp.data.augment import normalize
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.planning import make_plan
from jaxdp.recipes import find_config, load_config
from jaxdp.schedules import learning_rate
from jaxdp.validation import changes, from_json

NAMES = sorted(path.stem for path in find_config("digits").parent.glob("*.py"))
IMAGES = 1_281_167

# Mikami et al., Tables 3 and 4: GPUs, mesh, then (first epoch, workers, images a worker) of every phase
PAPER = {
    "imagenet_lars_32k": (1024, (32, 32), [(0, 1024, 32)]),
    "imagenet_sony_exp1": (2176, (34, 64), [(0, 2176, 16), (30, 2176, 32)]),
    "imagenet_sony_exp2": (3456, (48, 72), [(0, 3456, 16), (30, 1728, 32)]),
    "imagenet_sony_exp3": (3456, (48, 72), [(0, 3456, 16), (30, 2048, 32)]),
    "imagenet_sony_exp4": (4096, (64, 64), [(0, 2176, 16), (30, 4352, 16), (45, 2720, 32), (75, 3808, 32)]),
}
# section 3.2: 0.9 for configuration A; configuration B keeps the noise scale, here by global batch
MOMENTA_OF_B = {55296: 0.940741, 65536: 0.95}


def documentation(name):
    """The docstring of a recipe's file, and of the function that it calls, if its source has several recipes."""
    text = find_config(name).read_text()
    functions = [
        function for function in (published.mlperf, published.mikami, published.rsb) if f"{function.__name__}(" in text
    ]
    return "\n".join([ast.get_docstring(ast.parse(text)), *map(inspect.getdoc, functions)])


def plan_of(name, devices, *flags):
    config = load_config(name, flags)
    return make_plan(config, examples=sources.inspect(config)[1], devices=devices)


@pytest.mark.parametrize("name", PAPER)
def test_recipe_of_mikami_et_al_has_the_papers_phases(name):
    gpus, shape, phases = PAPER[name]
    plan = plan_of(name, gpus)
    assert plan.examples == IMAGES
    planned = [(round(p.first_epoch - 0.05), p.workers, p.per_worker_batch) for p in plan.phases]
    assert planned == phases
    for phase in plan.phases:
        assert phase.global_batch == phase.workers * phase.per_worker_batch
        of_b = name in ("imagenet_sony_exp2", "imagenet_sony_exp3")
        assert phase.momentum == pytest.approx(MOMENTA_OF_B[phase.global_batch] if of_b else 0.9, abs=5e-7)
        if phase.devices == gpus:  # in no phase of exp4
            assert phase.shape == shape


def test_phases_of_exp4_use_fewer_devices_and_have_the_most_square_mesh():
    shapes = [phase.shape for phase in plan_of("imagenet_sony_exp4", 4096).phases]
    assert shapes == [(34, 64), (34, 64), (40, 68), (56, 68)]


@pytest.mark.parametrize("name", PAPER)
def test_recipe_of_mikami_et_al_has_the_papers_precision(name):
    config = load_config(name)
    assert (config.model.dtype, config.reduce.wire_dtype, config.reduce.strategy) == ("float16", "float16", "torus")
    assert (config.model.norm_momentum, config.model.norm, config.data.augmentation) == (0.0, "per_worker", "paper")
    assert config.data.stored_size == 320
    other_reading = load_config(name, ["--optimizer.adapt", "all"]).optimizer
    assert other_reading == dataclasses.replace(config.optimizer, adapt="all")
    assert "`--optimizer.adapt all`" in documentation(name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("imagenet_lars_32k", {0: 0.2, 2.5: 14.6, 5: 25.867284, 30: 12.888889, 75: 0.805556}),
        ("imagenet_sony_exp2", {0: 0.2, 2.5: 14.6, 5: 25.867284, 30: 22.222222, 60: 5.555556, 75: 1.388889, 90: 0.0}),
        ("imagenet_sony_exp1", {17: 17.000005, 34: 34.0}),
        ("imagenet_goyal_256", {0: 0.1, 10: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001}),
        ("imagenet_goyal_8k", {0: 0.1, 5: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032}),
        # by hand: 1e-4 + (34 - 1e-4) (1 - (epoch - 34) / 56)^2
        ("imagenet_sony_exp4", {0: 1e-5, 34: 34.0, 62: 8.500075, 90: 1e-4}),
        ("imagenet_mlperf_3264", {0: 0.0, 1: 5.25, 2: 10.5, 19.5: 2.625075, 37: 1e-4}),
        ("imagenet_mlperf_8192", {2.5: 8.5, 5: 17.0, 24.5: 4.250075, 44: 1e-4}),
        ("imagenet_mlperf_32768", {8: 10.6, 16: 21.2, 37: 5.300075, 58: 1e-4}),
        ("imagenet_mlperf_65536", {15.5: 12.3495, 31: 24.699, 60: 6.174825, 89: 1e-4}),
    ],
)
def test_learning_rates_of_a_recipe_are_published_values(name, values):
    config = load_config(name)
    for epoch, value in values.items():
        ours = learning_rate(config.schedule, epoch, epochs=config.epochs, global_batch=config.batch[0].global_batch)
        assert ours == pytest.approx(value, rel=1e-6, abs=5e-7)


# What each source prints, typed from it and not from the recipes; a field that is not named here is the default of the config.
PAPER_A = {"name": "sony_a", "learning_rate": 34.0, "warmup_epochs": 34.0, "start": 1e-5, "end": 1e-4, "power": 2.0}
PAPER_B = {"name": "sony_b", "learning_rate": 29.0, "warmup_epochs": 5.0, "start": 0.2, "power": 2.0}
REFERENCE = PAPER_B | {"boundaries": ()}
PAPER_B = PAPER_B | {"boundaries": (30.0,), "factor": pytest.approx(50 / 29)}
GOYAL = {"name": "goyal", "learning_rate": 0.1, "warmup_epochs": 5.0, "boundaries": (30.0, 60.0, 80.0), "factor": 0.1}
LARS = {"name": "lars", "momentum": 0.9, "trust_coefficient": 0.001, "nesterov": False}
LARS |= {"adapt": "weights"}  # as in TensorFlow and MLPerf
LARS_A = LARS | {"momentum_rule": "constant", "weight_decay": 1e-4, "eps": 1e-6}
LARS_B = LARS_A | {"momentum_rule": "noise_scale", "label_smoothing": 0.1}
SGD = {"name": "sgd", "momentum": 0.9, "momentum_rule": "constant", "nesterov": True, "weight_decay": 1e-4}
SGD |= {"label_smoothing": 0.0}
SOURCES = {
    "imagenet_lars_32k": (90.0, REFERENCE, LARS_A | {"label_smoothing": 0.0}),
    "imagenet_sony_exp1": (90.0, PAPER_A, LARS_A | {"label_smoothing": 0.0}),
    "imagenet_sony_exp2": (90.0, PAPER_B, LARS_B),
    "imagenet_sony_exp3": (90.0, PAPER_B, LARS_B),
    "imagenet_sony_exp4": (90.0, PAPER_A, LARS_A | {"label_smoothing": 0.1}),
    "imagenet_goyal_256": (90.0, GOYAL, SGD),
    "imagenet_goyal_8k": (90.0, GOYAL, SGD),
}


@pytest.mark.parametrize("name", SOURCES)
def test_hyperparameters_of_a_recipe_are_those_of_its_source(name):
    config = load_config(name)
    epochs, schedule, optimizer = SOURCES[name]
    assert config.epochs == epochs
    for part, expected in ((config.schedule, schedule), (config.optimizer, optimizer)):
        assert {field: getattr(part, field) for field in expected} == expected
    assert (config.model.depth, config.model.classes, config.data.image_size) == (50, 1000, 224)
    if "goyal" in name:  # section 5.1: normalization over 32 images a worker, never across workers
        assert (config.model.norm, config.batch[0].per_worker_batch) == ("per_worker", 32)
        assert [phase.global_batch for phase in config.batch] == [{"256": 256, "8k": 8192}[name.split("_")[-1]]]
        assert (config.augment.min_area, config.model.norm_momentum) == (0.08, 0.9)


# MLPerf v4.0, mlcommons/logging, training_4.0.0/rcps_resnet.json: batch -> rate, warm-up, momentum, decay, model_bn_span,
# opt_learning_rate_decay_steps, and the checker's mean of the epochs to 75.9 % (without the best and the worst)
MLPERF = {
    3264: (10.5, 2, 0.9, 5e-5, 204, 14523, 35.15),
    8192: (17.0, 5, 0.9, 2e-4, 64, 6095, 41.88),
    32768: (21.2, 16, 0.94, 2.5e-5, 128, 2267, 56.0),
    65536: (24.699, 31, 0.951807, 1e-4, 128, 1133, 84.5),
}


@pytest.mark.parametrize("batch", MLPERF)
def test_mlperf_recipes_have_the_reference_hyperparameters(batch):
    config = load_config(f"imagenet_mlperf_{batch}")
    rate, warm_up, momentum, decay, span, decay_steps, mean = MLPERF[batch]
    assert [(phase.global_batch, phase.per_worker_batch) for phase in config.batch] == [(batch, span)]
    schedule = {"name": "polynomial", "learning_rate": rate, "warmup_epochs": warm_up, "start": 0.0, "end": 1e-4, "power": 2.0}
    # closed_resnet_lars.yaml of the same release allows no epsilon but 0
    optimizer = LARS | {"momentum": momentum, "weight_decay": decay, "eps": 0.0, "label_smoothing": 0.1}
    for part, expected in ((config.schedule, schedule), (config.optimizer, optimizer)):
        assert {field: getattr(part, field) for field in expected} == expected
    assert (config.model.norm, config.model.norm_momentum) == ("per_worker", 0.9)
    assert (config.model.depth, config.model.classes, config.data.image_size) == (50, 1000, 224)
    assert config.augment.min_area == 0.05  # imagenet_preprocessing.py: area_range=[0.05, 1.0]
    prepared = normalize(np.full((1, 2, 2, 3), 100, np.uint8), *pixel_stats(config))  # its means, and no standard deviation
    np.testing.assert_allclose(prepared[0, 0, 0], (100 - 123.68, 100 - 116.78, 100 - 103.94), rtol=1e-5)
    # Of the two readings of the decay's length, with the warm-up or after it, the one that ends at or just past the mean.
    counted_from = warm_up if decay_steps * batch / IMAGES < mean else 0
    assert (config.epochs - counted_from) * IMAGES / batch == pytest.approx(decay_steps, rel=1e-3)
    assert mean < config.epochs < mean + 5


# The recipes of 2021 and 2022, typed from their sources: sections of the config -> fields.
RSB = {  # Table 2 of arXiv 2110.00476, with timm's LAMB
    "data": {"eval_resize": 0.95, "mix": "mixup_or_cutmix", "auto_augment": "rand_augment_increasing"},
    "optimizer": {"name": "lamb", "loss": "binary", "beta2": 0.999, "clip_norm": 1.0, "target_threshold": 0.2},
    "schedule": {"name": "cosine", "warmup_epochs": 5.0, "start": 1e-4, "end": 1e-6},  # timm's defaults
    "augment": {"flip": True, "min_area": 0.08, "erase_probability": 0.0},
}
A12 = {"rate": 5e-3, "repeats": 3, "eval": 224}
TODAY = {
    "imagenet_rsb_a1": (600.0, 80.4, [(2048, 224)], RSB, A12 | {"decay": 0.01, "mixup": 0.2}),
    "imagenet_rsb_a2": (300.0, 79.8, [(2048, 224)], RSB, A12 | {"decay": 0.02, "mixup": 0.1}),
    "imagenet_rsb_a3": (100.0, 78.1, [(2048, 160)], RSB, A12 | {"decay": 0.02, "mixup": 0.1, "rate": 8e-3, "repeats": 1}),
    "imagenet_torchvision_v2": (
        600.0,
        80.858,
        [(1024, 176)],
        {
            "data": {"eval_resize": 232, "auto_augment": "trivial_augment", "mix": "mixup_or_cutmix"},
            "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": False, "label_smoothing": 0.1, "loss": "softmax"},
            "schedule": {"name": "cosine", "warmup_epochs": 5.0, "start": pytest.approx(0.01 * 0.5), "end": 0.0},
            "augment": {"erase_probability": 0.1, "operation_interpolation": "bilinear", "crop_interpolation": "bilinear"},
        },
        {"decay": 2e-5, "rate": 0.5, "mixup": 0.2, "repeats": 4, "eval": 224},
    ),
    "imagenet_ffcv_16": (
        16.0,
        73.8,
        [(4096, 160), (4096, 192)],
        {
            "data": {"eval_resize": 0.875, "eval_interpolation": "area", "auto_augment": "none", "mix": "none"},
            "augment": {"crop_interpolation": "area", "min_area": 0.08},
            "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": False, "label_smoothing": 0.1, "loss": "softmax"},
            "schedule": {"name": "polynomial", "power": 1.0, "warmup_epochs": 2.0, "start": pytest.approx(1.7e-4), "end": 0.0},
            "model": {"blur_pool": "convolutions"},
        },
        {"decay": 1e-4, "rate": 1.7, "mixup": None, "repeats": 1, "eval": 256},
    ),
    "imagenet_mosaic_mild": (
        pytest.approx(0.36 * 90),
        76.19,
        [(2048, size) for size in (88, 104, 120, 136, 152, 168, 176)],
        {
            "data": {"eval_resize": 232, "eval_interpolation": "area", "auto_augment": "none", "mix": "none"},
            "augment": {"crop_interpolation": "area", "min_area": 0.08},
            "optimizer": {"name": "sgd", "momentum": 0.875, "nesterov": False, "label_smoothing": 0.08, "loss": "binary_sum"},
            "schedule": {"name": "cosine", "warmup_epochs": 8.0, "start": 0.0, "end": 0.0},
            "model": {"blur_pool": "convolutions_and_pool", "classifier_bias": "class_frequency"},
        },
        {"decay": pytest.approx(5e-4 * 0.125 / 2.048), "rate": 2.048, "mixup": None, "repeats": 1, "eval": 224},
    ),
}


@pytest.mark.parametrize("name", TODAY)
def test_recipes_of_today_have_the_figures_of_their_sources(name):
    epochs, accuracy, phases, sections, more = TODAY[name]
    config = load_config(name)
    assert config.epochs == epochs
    plan = plan_of(name, 8)
    assert [(phase.global_batch, phase.image_size) for phase in plan.phases] == phases
    assert {phase.devices for phase in plan.phases} == {8}
    for section, fields in sections.items():
        assert {field: getattr(getattr(config, section), field) for field in fields} == fields
    assert config.optimizer.weight_decay == more["decay"]
    assert config.schedule.learning_rate == more["rate"]
    assert config.data.repeats == more["repeats"]
    assert (config.data.evaluated_size, config.model.classes) == (more["eval"], 1000)
    assert (config.data.augmentation, config.model.depth, config.model.norm) == ("random_resized_crop", 50, "per_worker")
    if more["mixup"] is not None:
        assert config.data.mix_alpha == more["mixup"]
    assert f"Published: {accuracy:g} % top-1" in documentation(name)


def test_rsb_differs_between_its_procedures_as_in_table_2():
    a1, a2, a3 = (load_config(f"imagenet_rsb_{name}") for name in ("a1", "a2", "a3"))
    assert [config.optimizer.label_smoothing for config in (a1, a2, a3)] == [0.1, 0.0, 0.0]
    assert [config.model.drop_path for config in (a1, a2, a3)] == [0.05, 0.05, 0.0]
    assert [config.augment.magnitude for config in (a1, a2, a3)] == [7, 7, 6]


@pytest.mark.parametrize("name", ["imagenet_rsb_a1", "imagenet_rsb_a2", "imagenet_rsb_a3"])
def test_rsb_says_how_far_its_rate_is_above_timms(name):
    """timm's CosineLRScheduler without warmup_prefix counts from epoch 0."""
    config, middle = load_config(name), 0.5
    timms = config.schedule.end + (config.schedule.learning_rate - config.schedule.end) * 0.5 * (1 + math.cos(math.pi * middle))
    ours = learning_rate(config.schedule, middle * config.epochs, epochs=config.epochs, global_batch=2048)
    assert f" {100 * (ours / timms - 1):.1f} % higher than timm's halfway" in documentation(name)


def test_averages_decay_as_in_the_sources():
    """torchvision averages every 32 steps with 1 - 2e-5 x 8 x 128 x 32 / 600; Composer halves in 100 steps."""
    names = "imagenet_torchvision_v2", "imagenet_mosaic_mild"
    torchvision, mosaic = (load_config(name).optimizer.average_decay for name in names)
    assert torchvision**32 == pytest.approx(1 - 2e-5 * 8 * 128 * 32 / 600, rel=1e-12)
    assert mosaic**100 == pytest.approx(0.5, rel=1e-12)


def test_progressive_sizes_of_mosaic_follow_the_line_of_the_source():
    """Half of 176 until 40 % of the run, all of it from 80 % on, between them within half a step of 16 of the line."""
    plan = plan_of("imagenet_mosaic_mild", 8)
    for share in (0.1, 0.39, 0.45, 0.5, 0.6, 0.7, 0.75, 0.81, 0.95):
        line = 88 + 88 * min(max((share - 0.4) / 0.4, 0), 1)
        size = plan.phases[plan.phase_at(int(share * plan.total_samples))].image_size
        assert abs(size - line) <= 8.2


def test_ffcv_grows_where_the_source_rounds_its_ramp():
    """np.interp to the nearest multiple of 32, by whole epochs: configs of 16 and 88 epochs."""
    longer = ["--epochs", "88", "--batch.0.until-epoch", "71", "--schedule.warmup-epochs", "2"]
    for flags, ramp in (([], (11, 13)), (longer, (65, 76))):
        plan = plan_of("imagenet_ffcv_16", 8, *flags)
        for epoch in range(int(plan.config.epochs)):
            size = plan.phases[plan.phase_at(int((epoch + 0.5) * plan.examples))].image_size
            assert size == int(np.round(np.interp(epoch, ramp, (160, 192)) / 32)) * 32
        assert plan.config.schedule.warmup_epochs == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_documented_and_can_be_planned(name):
    config = load_config(name)
    assert config.name == name
    text = documentation(name)
    assert "python train.py" in text
    if name != "digits":
        assert f"--config {name}" in text
        assert "Source:" in text
        assert "choice" in text
    plan = make_plan(config, examples=sources.inspect(config)[1], devices=8)
    assert plan.total_samples >= config.epochs * plan.examples


@pytest.mark.parametrize("name", NAMES)
def test_flags_in_the_docstring_of_a_recipe_exist(name):
    text = documentation(name)
    for line in re.findall(r"`(--[^`]*)`", text.replace("\n", " ")):
        flags = re.sub(r"\s+", " ", line).split()
        if flags[0].endswith(("*", "norm-momentum", "weight-decay", "epochs", "per-worker-batch")) and len(flags) == 1:
            continue  # a field named without a value
        load_config(name, flags)


def test_plan_on_fewer_devices_accumulates():
    phases = plan_of("imagenet_sony_exp2", 8).phases
    assert [(p.devices, p.accumulation, p.idle_devices) for p in phases] == [(8, 432, 0), (8, 216, 0)]
    phases = plan_of("imagenet_sony_exp4", 4096).phases
    assert [(p.devices, p.accumulation) for p in phases] == [(2176, 1), (2176, 2), (2720, 1), (3808, 1)]
    assert [p.idle_devices for p in phases] == [1920, 1920, 1376, 288]


def test_momentum_rule_as_printed_with_negative_momentum_is_rejected():
    assert plan_of("imagenet_sony_exp3", 8, "--optimizer.momentum-rule", "as_printed").phases[1].momentum == pytest.approx(0.8)
    flags = ["--optimizer.momentum-rule", "as_printed", "--optimizer.momentum", "0.3"]
    with pytest.raises(ConfigError, match=r"optimizer.momentum_rule='as_printed': momentum is -.* must be in \[0, 1\)"):
        plan_of("imagenet_sony_exp3", 8, *flags)


def test_measured_digits_runs_have_the_recipes_config_and_98_percent():
    measured = json.loads((find_config("digits").parent.parent / "benchmarks/results/digits_seeds.json").read_text())
    assert changes(from_json(json.dumps(measured["config"])), load_config("digits")) == []
    runs = {(run["as"], run["seed"], run["code"]): run["accuracy"] for run in measured["runs"]}
    assert {(seed, code) for kind, seed, code in runs if kind == "default"} == {
        (seed, code) for seed in range(10) for code in ("native", "AVX2")
    }
    assert {kind for kind, _, _ in runs} == {"default", "8 devices", "validation split"}
    assert min(accuracy for (kind, _, _), accuracy in runs.items() if "split" not in kind) >= 0.98  # CI's bar


@pytest.mark.parametrize("recipe", NAMES)
def test_the_warm_up_of_no_recipe_runs_downwards_with_a_small_batch(recipe):
    config = load_config(recipe)
    warmup = config.schedule.warmup_epochs
    for batch in (1, 32, 255, 256):
        position = {"epochs": config.epochs, "global_batch": batch}
        rates = [learning_rate(config.schedule, warmup * tenth / 10, **position) for tenth in range(10)]
        assert rates == sorted(rates), batch
