"""Every published recipe against the figures of its source."""

import ast

import pytest

from jaxdp.config import ConfigError
from jaxdp.data.sources import training_examples
from jaxdp.planning import make_plan
from jaxdp.recipes import find_config, load_config

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
# momentum that keeps the noise scale, by global batch
MOMENTA = {34816: 0.905882, 55296: 0.940741, 65536: 0.95, 69632: 0.952941, 87040: 0.962353, 121856: 0.973109}


def plan_of(name, devices, *flags):
    config = load_config(name, flags)
    return make_plan(config, training_examples(config), devices)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_phases(name):
    gpus, shape, phases = PAPER[name]
    plan = plan_of(name, gpus)
    assert plan.examples == IMAGES
    planned = [(round(p.first_epoch - 0.05), p.workers, p.per_worker_batch) for p in plan.phases]
    assert planned == phases
    for phase in plan.phases:
        assert phase.global_batch == phase.workers * phase.per_worker_batch
        if name != "imagenet_lars_32k":
            assert phase.momentum == pytest.approx(MOMENTA[phase.global_batch], abs=5e-7)
    if name in ("imagenet_lars_32k", "imagenet_sony_exp1"):  # the most square shape is the published one
        assert {(p.vertical, p.horizontal) for p in plan.phases} == {shape}
    if name == "imagenet_sony_exp2":  # elsewhere a side is asked for
        phases = plan_of(name, gpus, "--mesh.horizontal", "72").phases
        assert [(p.vertical, p.horizontal) for p in phases] == [shape, (24, 72)]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_precision_statistics_and_smoothing(name):
    config = load_config(name)
    assert (config.model.dtype, config.reduce.wire_dtype, config.reduce.strategy) == ("float16", "float16", "torus")
    assert (config.model.statistics, config.model.norm, config.data.augmentation) == ("last_batch", "per_worker", "paper")
    smoothing = 0.0 if name in ("imagenet_lars_32k", "imagenet_sony_exp1") else 0.1
    assert config.optimizer.label_smoothing == smoothing
    assert (config.optimizer.trust_coefficient, config.optimizer.weight_decay, config.epochs) == (0.001, 1e-4, 90.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("imagenet_lars_32k", {0: 0.2, 2.5: 14.6, 5: 25.867284, 30: 12.888889, 75: 0.805556}),
        ("imagenet_sony_exp2", {0: 0.2, 2.5: 14.6, 5: 25.867284, 30: 22.222222, 60: 5.555556, 75: 1.388889, 90: 0.0}),
        ("imagenet_sony_exp1", {17: 17.000005, 34: 34.0}),
        ("imagenet_goyal_256", {0: 0.1, 10: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001}),
        ("imagenet_goyal_8k", {0: 0.1, 5: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032}),
        ("imagenet_mlperf_3264", {0: 0.0, 2: 10.5, 37: 1e-4}),
        ("imagenet_mlperf_65536", {31: 24.699}),
    ],
)
def test_rates_are_the_published_ones(name, values):
    from jaxdp import schedules

    config = load_config(name)
    for epoch, value in values.items():
        ours = schedules.learning_rate(config.schedule, config.epochs, epoch, config.batch[0].global_batch)
        assert ours == pytest.approx(value, rel=1e-6, abs=5e-7)


# MLPerf v4.0 reference convergence points: batch -> rate, warm-up, momentum, decay, epochs in the mean
MLPERF = {
    3264: (10.5, 2, 0.9, 5e-5, 35.15),
    8192: (17.0, 5, 0.9, 2e-4, 41.88),
    32768: (21.2, 16, 0.94, 2.5e-5, 56.0),
    65536: (24.699, 31, 0.951807, 1e-4, 84.5),
}


@pytest.mark.parametrize("batch", MLPERF)
def test_mlperf_recipes_have_the_reference_hyperparameters(batch):
    config = load_config(f"imagenet_mlperf_{batch}")
    rate, warm_up, momentum, decay, epochs = MLPERF[batch]
    assert config.batch[0].global_batch == batch
    assert (config.schedule.learning_rate, config.schedule.warmup_epochs, config.schedule.end) == (rate, warm_up, 1e-4)
    assert (config.optimizer.momentum, config.optimizer.weight_decay, config.optimizer.label_smoothing) == (
        momentum,
        decay,
        0.1,
    )
    assert epochs < config.epochs < epochs + 4


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_named_documented_and_can_be_planned(name):
    path = find_config(name)
    config = load_config(name)
    assert config.name == name
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert "python train.py" in text
    if name != "digits":
        assert f"--config {name}" in text
        assert "Source:" in text
        assert "choice" in text
    plan = make_plan(config, training_examples(config), 8)
    assert plan.total_samples >= config.epochs * plan.examples


@pytest.mark.parametrize("name", NAMES)
def test_flags_named_by_a_recipe_exist(name):
    import re

    text = ast.get_docstring(ast.parse(find_config(name).read_text()))
    for line in re.findall(r"`(--[^`]*)`", text.replace("\n", " ")):
        flags = re.sub(r"\s+", " ", line).split()
        if flags[0].endswith(("*", "norm-momentum", "weight-decay", "epochs", "per-worker-batch")) and len(flags) == 1:
            continue  # a field named without a value
        load_config(name, flags)


def test_accumulation_makes_up_for_the_devices_that_are_missing():
    phases = plan_of("imagenet_sony_exp2", 8).phases
    assert [(p.devices, p.accumulation, p.idle_devices) for p in phases] == [(8, 432, 0), (8, 216, 0)]
    phases = plan_of("imagenet_sony_exp4", 4096).phases
    assert [(p.devices, p.accumulation) for p in phases] == [(2176, 1), (2176, 2), (2720, 1), (3808, 1)]
    assert [p.idle_devices for p in phases] == [1920, 1920, 1376, 288]


def test_as_printed_momentum_is_refused_where_it_would_be_negative():
    assert plan_of("imagenet_sony_exp3", 8, "--optimizer.momentum-rule", "as_printed").phases[1].momentum == pytest.approx(0.8)
    flags = ["--optimizer.momentum-rule", "as_printed", "--optimizer.momentum-batch", "3000"]
    with pytest.raises(ConfigError, match=r"optimizer.momentum_rule: 'as_printed' is not allowed with batch.0.global_batch"):
        plan_of("imagenet_sony_exp3", 8, *flags)


def test_a_data_set_that_is_not_there_is_refused_with_the_ways_to_get_and_to_rehearse_it(tmp_path):
    from jaxdp import train

    with pytest.raises(
        ConfigError,
        match=r"data.source: 'cifar10' .* it is not prepared in .*`jaxdp data prepare cifar10`.* --data.source synthetic",
    ):
        train(load_config("cifar10_resnet50"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "fit"])
def test_the_planned_number_of_digits_is_the_real_one(split):
    from jaxdp.data.sources import open_datasets

    config = load_config("digits", ["--data.train-split", split])
    assert training_examples(config) == len(open_datasets(config).train)


def test_every_recipe_is_in_the_documentation():
    page = (find_config("digits").parent.parent / "docs/recipes.md").read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in page] == []
