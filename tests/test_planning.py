import dataclasses
import math
import re
from fractions import Fraction

import pytest

from jaxdp.config import Config, Data, Evaluation, Mesh, Model, Optimizer, Phase, Reduce, Schedule
from jaxdp.errors import ConfigError
from jaxdp.planning import make_plan, small_worker_warning
from jaxdp.recipes import apply_flags, load_config
from jaxdp.validation import with_fields

NO_MESH = Mesh()


def config_with(*phases, mesh=NO_MESH, epochs=10.0):
    return Config(batch=phases, mesh=mesh, epochs=epochs, schedule=Schedule(warmup_epochs=1.0))


def test_make_plan_with_two_phases_has_their_steps_and_meshes():
    plan = make_plan(config_with(Phase(96, 3.5), Phase(256)), examples=1000, devices=4)
    first, second = plan.phases
    assert (first.first_sample, first.steps, second.first_sample) == (0, 37, 3552)
    assert (second.steps, plan.total_steps, plan.total_samples) == (26, 63, 3552 + 26 * 256)
    assert (first.vertical, first.horizontal, first.per_worker_batch, first.workers) == (2, 2, 24, 4)
    assert [plan.phase_at(s) for s in (0, 3456, 3552, 9000)] == [0, 0, 1, 1]


def test_phase_inside_the_last_step_of_the_one_before_is_left_out():
    plan = make_plan(config_with(Phase(400, 1.1), Phase(100, 1.2), Phase(50), epochs=2.0), examples=1000, devices=1)
    assert [(phase.index, phase.first_sample, phase.steps) for phase in plan.phases] == [(0, 0, 3), (2, 1200, 16)]


def test_training_hours_follow_from_the_devices_that_each_phase_uses():
    plan = make_plan(config_with(Phase(100, 1.0), Phase(50), epochs=3.0), examples=1000, devices=4)
    assert [phase.devices for phase in plan.phases] == [4, 2]
    assert plan.training_hours(10.0) == pytest.approx((1000 / 4 + 2000 / 2) / 10 / 3600)
    halved = config_with(Phase(100, 1.0, image_size=16), Phase(50), epochs=3.0)  # of 32x32 otherwise
    plan = make_plan(halved, examples=1000, devices=4)
    assert plan.training_hours(10.0) == pytest.approx((1000 / 4 / 4 + 2000 / 2) / 10 / 3600)


def test_make_plan_with_more_workers_than_devices_accumulates():
    (phase,) = make_plan(config_with(Phase(1024, per_worker_batch=32)), examples=5000, devices=8).phases
    assert (phase.workers, phase.accumulation, phase.devices, phase.per_device_batch) == (32, 4, 8, 128)


def test_make_plan_with_indivisible_workers_leaves_devices_idle():
    (phase,) = make_plan(config_with(Phase(160, per_worker_batch=32)), examples=5000, devices=8).phases
    assert (phase.devices, phase.idle_devices, phase.accumulation) == (5, 3, 1)


def test_make_plan_with_a_batch_that_the_mesh_cannot_divide_raises_with_the_nearest_batch():
    with pytest.raises(ConfigError) as caught:
        make_plan(config_with(Phase(100), mesh=Mesh(vertical=2, horizontal=4)), examples=5000, devices=8)
    assert str(caught.value) == (
        "batch.0.global_batch=100: global batch 100 cannot be divided evenly among mesh.vertical=2 and mesh.horizontal=4; "
        "use the nearest possible batch 96, or omit mesh.vertical and mesh.horizontal"
    )


def test_make_plan_with_2_to_the_32_samples_raises():
    with pytest.raises(ConfigError, match=r"^epochs=4000\.0: 51\d{8} samples .* must be less than 2\^32 samples"):
        make_plan(config_with(Phase(4096), epochs=4000.0), examples=1_281_167, devices=8)


def test_make_plan_with_one_side_chooses_the_other_by_the_workers():
    phases = make_plan(config_with(Phase(96, 5.0), Phase(160), mesh=Mesh(horizontal=4)), examples=5000, devices=24).phases
    assert [(p.vertical, p.horizontal, p.idle_devices) for p in phases] == [(6, 4, 0), (5, 4, 4)]
    with pytest.raises(ConfigError, match=r"among mesh\.vertical=3; use the .* batch 255, or omit mesh\.vertical$"):
        make_plan(config_with(Phase(256), mesh=Mesh(vertical=3)), examples=5000, devices=8)


def test_make_plan_with_an_odd_batch_on_two_processes_names_the_processes_only():
    with pytest.raises(ConfigError, match=r"among 2 processes; use the nearest possible batch 62$"):
        make_plan(config_with(Phase(63)), examples=5000, devices=8, processes=2)


def test_every_process_has_the_same_number_of_a_phases_devices():
    """Two hosts with four processes each, as Slurm starts one for each GPU: hosts are rows, processes have devices."""
    plan = make_plan(config_with(Phase(24, 5.0), Phase(64)), examples=1000, devices=16, processes=8, rows=2)
    assert [(phase.shape, phase.devices, phase.local_devices) for phase in plan.phases] == [((2, 4), 8, 1), ((2, 8), 16, 2)]


@pytest.mark.parametrize("batches", [(100, 50), (50, 100), (96, 36)])
@pytest.mark.parametrize("every", [None, 0.3, 1.0, 1.1, 2.5])
def test_evaluations_before_the_end_and_remaining_steps_are_those_of_a_walk(batches, every):
    """The first batch until epoch 1.1 of 2.5, then a larger or a smaller one."""
    config = dataclasses.replace(config_with(Phase(batches[0], 1.1), Phase(batches[1]), epochs=2.5), mesh=Mesh())
    plan = make_plan(dataclasses.replace(config, evaluation=Evaluation(every_epochs=every)), examples=1000, devices=1)
    ends, seen = [], 0
    while seen < 2500:
        seen += batches[0] if seen < 1100 else batches[1]
        ends.append(seen)
    times = [Fraction(str(every)) * 1000 * n for n in range(1, 20)] if every else []
    due = {next(end for end in ends if end >= time) for time in times if time <= seen}
    assert plan.evaluations_before_end == len(due - {seen})
    assert [plan.steps_after(end) for end in [0, *ends]] == list(range(len(ends), -1, -1))
    assert [plan.steps_after(end - 1) for end in ends] == list(range(len(ends), 0, -1))  # a step that lacks an image remains


def test_plan_learning_rate_uses_the_batch_of_the_phase_at_the_sample():
    config = dataclasses.replace(
        config_with(Phase(256, 5.0), Phase(512)), schedule=Schedule("goyal", 0.1, warmup_epochs=2.0, boundaries=(8.0,))
    )
    plan = make_plan(config, examples=2560, devices=1)
    assert plan.learning_rate(0) == pytest.approx(0.1)
    assert plan.learning_rate(4 * 2560) == pytest.approx(0.1)
    assert plan.learning_rate(5 * 2560) == pytest.approx(0.2)
    assert plan.learning_rate(8 * 2560) == pytest.approx(0.02)


def test_make_plan_with_a_batch_larger_than_the_training_set_raises():
    assert make_plan(config_with(Phase(1000)), examples=1000, devices=4).phases[0].global_batch == 1000
    with pytest.raises(ConfigError, match=r"batch.0.global_batch=1001: the training set has only 1000 images"):
        make_plan(config_with(Phase(1001)), examples=1000, devices=1)


@pytest.mark.parametrize(
    ("phase", "examples", "flags"),
    [
        (Phase(1001), 1000, ["--batch.0.global-batch", "512"]),
        (Phase(256, per_worker_batch=32), 48, ["--batch.0.global-batch", "32"]),
        (Phase(256, per_worker_batch=32), 100, ["--batch.0.global-batch", "96"]),
        (Phase(256, per_worker_batch=32), 20, ["--batch.0.global-batch", "16", "--batch.0.per-worker-batch", "16"]),
        (Phase(2), 1, ["--batch.0.global-batch", "1"]),
    ],
)
def test_the_batch_that_the_error_of_a_small_training_set_suggests_works(phase, examples, flags):
    with pytest.raises(ConfigError) as error:
        make_plan(config_with(phase), examples=examples, devices=4)
    assert error.value.hint == f"use {' '.join(flags)}"
    config = apply_flags(config_with(phase), [*flags, "--data.image-size", "64"])  # one of 32x32 is too small to normalize
    make_plan(config, examples=examples, devices=4)


def small(size, *phases, **fields):
    """A narrow ResNet-18 for images of one size."""
    model = Model(**{"depth": 18, "width": 1, "classes": 2} | fields)
    return dataclasses.replace(config_with(*phases), model=model, data=Data(image_size=size))


@pytest.mark.parametrize(
    ("stem", "depth", "size", "batch"),
    [
        ("imagenet", 18, 32, 1),
        ("imagenet", 18, 33, 1),
        ("imagenet", 18, 32, 8),
        ("imagenet", 18, 65, 1),
        ("imagenet", 50, 32, 1),
        ("imagenet", 50, 32, 2),
        ("small", 18, 8, 1),
        ("small", 18, 9, 2),
        ("small", 50, 8, 9),
    ],
)
def test_batch_normalization_over_one_value_is_refused_and_up_to_eight_counted(stem, depth, size, batch):
    """The last map has ceil(size / 32) rows, or ceil(size / 8) with the small stem."""
    config = small(size, Phase(4 * batch, per_worker_batch=batch), stem=stem, depth=depth)
    values = batch * math.ceil(size / {"imagenet": 32, "small": 8}[stem]) ** 2
    if values == 1:
        with pytest.raises(ConfigError, match="has one value of each channel with images of"):
            make_plan(config, examples=5000, devices=4)
    else:
        (phase,) = make_plan(config, examples=5000, devices=4).phases
        assert phase.normalized_values == (values if values <= 8 else None)


@pytest.mark.parametrize(
    ("phase", "devices", "hint"),
    [
        (Phase(4, per_worker_batch=1), 1, "--batch.0.per-worker-batch 2"),
        (Phase(1), 1, "--batch.0.global-batch 2 --batch.0.per-worker-batch 2"),
        (Phase(4, per_worker_batch=1), 2, "--batch.0.per-worker-batch 2, or --model.norm synchronized"),
        (Phase(3), 3, "--batch.0.global-batch 6 --batch.0.per-worker-batch 2, or --model.norm synchronized"),
    ],
)
def test_the_fixes_of_batch_normalization_over_one_value_work(phase, devices, hint):
    config = small(32, phase)
    with pytest.raises(ConfigError) as caught:
        make_plan(config, examples=5000, devices=devices)
    assert (caught.value.field, caught.value.hint) == ("batch.0.per_worker_batch", f"use {hint}")
    for flags in hint.split(", or "):
        changed = apply_flags(config, flags.split())
        assert make_plan(changed, examples=5000, devices=devices).phases[0].normalized_values in (2, 3, 4)


def test_a_warm_up_that_lowers_the_rate_is_refused():
    config = load_config("imagenet_lars_32k", ["--schedule.learning-rate", "0.1"])
    with pytest.raises(ConfigError) as caught:
        make_plan(config, examples=50_000, devices=8)
    assert str(caught.value) == (
        "schedule.start=0.2: the warm-up would lower the rate from it to schedule.learning_rate (0.1); use --schedule.start 0"
    )
    for flags in (["--schedule.start", "0"], ["--schedule.warmup-epochs", "0"]):
        make_plan(apply_flags(config, flags), examples=50_000, devices=8)


@pytest.mark.parametrize("batches", [(100, 50), (50, 120), (96, 36)])
def test_steps_and_phases_at_a_number_of_samples_are_those_of_a_walk(batches):
    """The first batch until epoch 1.1 of 2.5, then a larger or a smaller one."""
    plan = make_plan(config_with(Phase(batches[0], 1.1), Phase(batches[1]), epochs=2.5), examples=1000, devices=1)
    starts, seen = [], 0
    while seen < 2500:
        starts.append(seen)
        seen += batches[0] if seen < 1100 else batches[1]
    second = next(index for index, start in enumerate(starts) if start >= 1100)
    for samples in range(0, seen + 200, 7):
        assert plan.first_step_from(samples) == next((start for start in starts if start >= samples), seen)
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], seen], strict=True)):
        assert plan.first_step_from(start) == start
        assert plan.phase_before(end).index == plan.phase_at(start) == (index >= second)
    assert plan.phase_before(0).index == 0
    first, last = plan.phases
    assert (first.end, last.end, plan.first_step_from(seen)) == (last.first_sample, seen, seen)
    epochs = [0.0, starts[second] / 1000, starts[second] / 1000, seen / 1000]
    assert [first.first_epoch, first.last_epoch, last.first_epoch, last.last_epoch] == epochs


def test_schedule_starts_at_the_sample_of_a_checkpoint_or_the_first_one_after_its_epoch():
    plan = make_plan(config_with(Phase(10)), examples=1437, devices=1)

    def start(epoch: float) -> int:
        schedule = Schedule(warmup_epochs=1.0, from_epoch=epoch)
        return dataclasses.replace(plan, config=dataclasses.replace(plan.config, schedule=schedule)).schedule_start

    assert [start(samples / 1437) for samples in range(1437)] == [*range(1437)]
    assert [start(samples / 1437) for samples in (0.4, 0.6, 99.4, 99.6)] == [1, 1, 100, 100]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(vertical=3), Mesh(horizontal=2), Mesh(vertical=3, horizontal=4)])
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("worker", [None, 2])
def test_mesh_has_the_most_devices_that_divide_the_batch_or_the_error_gives_the_nearest_that_can_be(mesh, processes, worker):
    def able(batch: int) -> list[tuple[int, int]]:
        """All meshes of 12 devices or fewer that fit."""
        pairs = [(rows, columns) for rows in range(1, 13) for columns in range(1, 13) if rows * columns <= 12]
        sides = ((mesh.vertical, 0), (mesh.horizontal, 1))
        pairs = [pair for pair in pairs if all(side in (None, pair[axis]) for side, axis in sides)]
        fit = [pair for pair in pairs if math.prod(pair) % processes == 0 and batch // (worker or 1) % math.prod(pair) == 0]
        return fit if batch % (worker or 1) == 0 else []

    for batch in range(2, 40, worker or 1):
        config = dataclasses.replace(config_with(Phase(batch, per_worker_batch=worker), mesh=mesh), data=Data(image_size=64))
        if fitting := able(batch):
            (phase,) = make_plan(config, examples=5000, devices=12, processes=processes).phases
            assert phase.shape in fitting
            assert phase.devices == max(map(math.prod, fitting))
            assert (phase.local_devices * processes, phase.idle_devices) == (phase.devices, 12 - phase.devices)
            assert phase.accumulation * phase.devices * phase.per_worker_batch == batch
        else:
            with pytest.raises(ConfigError, match="cannot be divided evenly") as error:
                make_plan(config, examples=5000, devices=12, processes=processes)
            near = int(error.value.hint.removeprefix("use the nearest possible batch ").partition(",")[0])
            possible = [other for other in range(1, 120) if able(other)]
            assert abs(near - batch) == min(abs(other - batch) for other in possible)


@pytest.mark.parametrize(
    ("config", "machine", "message"),
    [
        (config_with(Phase(8)), {"devices": 0}, "devices=0: must be at least 1"),
        (config_with(Phase(8)), {"devices": 1, "processes": 0}, "processes=0: must be at least 1"),
        (config_with(Phase(8), mesh=Mesh(vertical=3)), {"devices": 2}, "mesh.vertical=3: "),
        (
            config_with(Phase(12), mesh=Mesh(vertical=1, horizontal=3)),
            {"devices": 6, "processes": 2},
            "mesh='1x3': 3 devices cannot be divided evenly among 2 processes; omit mesh.vertical or mesh.horizontal",
        ),
        (
            config_with(Phase(99, 5.0), Phase(98)),
            {"devices": 2, "examples": 98},
            "batch.0.global_batch=99: the training set has ",
        ),
        (
            config_with(Phase(99, 5.0), Phase(98, 8.0), Phase(97)),
            {"devices": 2, "processes": 2},
            "batch.0.global_batch=99: global batch 99 cannot be divided evenly among 2 processes; "
            "use the nearest possible batch 98; also batch.2.global_batch=97: ",
        ),
        (
            dataclasses.replace(config_with(Phase(130)), reduce=Reduce(strategy="parameter_server")),
            {"devices": 65},
            "reduce.strategy='parameter_server': batch.0 uses 65 devices; parameter_server supports at most 64 devices; ",
        ),
        (
            dataclasses.replace(config_with(Phase(4)), data=Data(mix="mixup")),
            {"devices": 4},
            "data.mix='mixup': batch.0 has one image per worker and mixing needs two; increase",
        ),
        (
            config_with(Phase(4096), epochs=2.0**32 / 4096),
            {"examples": 4096},
            r"epochs=1048576.0: 4294967296 samples with 4096",
        ),
        (
            dataclasses.replace(config_with(Phase(8)), optimizer=Optimizer(momentum_rule="as_printed", momentum=1e-9)),
            {},
            None,
        ),
        (dataclasses.replace(config_with(Phase(8)), data=Data(mix="mixup", image_size=64)), {"devices": 4}, None),
        (config_with(Phase(4096), epochs=2.0**32 / 4096 - 1), {"examples": 4096}, None),
    ],
)
def test_run_that_cannot_be_planned_is_refused_in_one_line(config, machine, message):
    machine = {"examples": 5000, "devices": 1} | machine
    if message is None:
        make_plan(config, **machine)
        return
    with pytest.raises(ConfigError) as error:
        make_plan(config, **machine)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "refused", "accepted"),
    [
        ({"optimizer.loss": "softmax"}, {"optimizer.class_weights": (1.0, 2.0)}, {"optimizer.class_weights": (1.0, 2.0, 3.0)}),
        ({"optimizer.loss": "binary"}, {"optimizer.target_threshold": 1.0}, {"optimizer.target_threshold": 0.5}),
        ({}, {"stop.metric": "eval_top5"}, {"stop.metric": "eval_loss"}),
        ({"schedule.learning_rate": 0.5}, {"schedule.start": 0.51}, {"schedule.start": 0.5}),
    ],
)
def test_plan_refuses_what_does_not_fit_the_classes_of_the_data_or_the_peak(fields, refused, accepted):
    fields = fields | {"data.source": "folder", "model.classes": 3}
    make_plan(with_fields(config_with(Phase(9)), fields | accepted), examples=90, devices=1)
    with pytest.raises(ConfigError, match=rf"^{re.escape(next(iter(refused)))}="):
        make_plan(with_fields(config_with(Phase(9)), fields | refused), examples=90, devices=1)


FLAT = {"name": "goyal", "learning_rate": 1e15, "warmup_epochs": 0.0, "boundaries": ()}
UP = {"learning_rate": 1e13, "boundaries": (2.005, 5.0), "factor": 1e5}


@pytest.mark.parametrize(
    ("changes", "phases", "found"),
    [
        ({}, (Phase(256),), None),  # exactly the largest rate
        (UP, (Phase(128),), "5e+17 at epoch 2.12"),  # the first step from epoch 2.005
        (UP | {"from_epoch": 2.0}, (Phase(128),), "5e+17 at epoch 4.12"),
        ({"from_epoch": 2.0}, (Phase(512),), "2e+15 at epoch 2.00"),
        ({"warmup_epochs": 1.0}, (Phase(512),), "2e+15 at epoch 1.00"),
        ({"warmup_epochs": 20.0}, (Phase(1024),), "2.35e+15 at epoch 9.00"),  # the last step of a warm-up longer than the run
        ({}, (Phase(128, 3.0), Phase(512)), "2e+15 at epoch 3.00"),
        (UP | {"boundaries": tuple(2 + n / 1024 for n in range(1, 90))}, (Phase(128),), "inf at epoch 2.12"),
    ],
)
def test_rate_that_devices_cannot_hold_is_refused_with_its_first_step(changes, phases, found):
    config = dataclasses.replace(config_with(*phases), schedule=Schedule(**FLAT | changes))
    if found is None:
        make_plan(config, examples=1024, devices=1)
        return
    with pytest.raises(ConfigError, match=rf"^schedule\.learning_rate=.*: the learning rate is {re.escape(found)}; must be at"):
        make_plan(config, examples=1024, devices=1)


@pytest.mark.parametrize(
    ("fields", "phase", "devices", "expected"),
    [
        ({}, Phase(64, per_worker_batch=8), 8, None),  # given, with four values for each image of 64x64
        ({}, Phase(72), 8, None),
        ({}, Phase(64), 8, "workers of 8 images each, few for batch normalization; set a larger --batch.0.per-worker-batch, "),
        ({}, Phase(8), 1, None),
        ({"norm": "synchronized"}, Phase(64), 8, None),
        (
            {},
            Phase(16, per_worker_batch=2),
            8,
            "batch normalization averages over 8 values of each channel, with images of 64x64; ",
        ),
    ],
)
def test_warning_of_small_workers_is_for_what_the_plan_divides_or_averages(fields, phase, devices, expected):
    plan = make_plan(small(64, phase, **fields), examples=5000, devices=devices)
    warning = small_worker_warning(plan, has_batch_norm=True)
    assert warning is None if expected is None else warning.startswith(f"batch.0: {expected}")
    if expected is not None:
        assert warning.endswith(", or --model.norm synchronized")
        assert ("or --data.image-size" in warning) == ("64x64" in expected)
    only_divided = phase.per_worker_batch is None
    assert (small_worker_warning(plan, has_batch_norm=False) is None) == (only_divided or expected is None)


VALUES = "batch normalization averages over"
FEW, WORKER = "each, few for batch normalization; set a larger", "--batch.0.per-worker-batch"
BOTH, SYNCHRONIZED = f"--batch.0.global-batch and {WORKER}", ", or --model.norm synchronized"


@pytest.mark.parametrize(
    ("size", "phase", "devices", "norm", "expected"),
    [
        (32, Phase(16, per_worker_batch=4), 4, "per_worker", f"workers of 4 images {FEW} {WORKER}{SYNCHRONIZED}"),
        (32, Phase(4, per_worker_batch=4), 1, "per_worker", f"workers of 4 images {FEW} {BOTH}"),
        (32, Phase(4), 1, "per_worker", f"workers of 4 images {FEW} --batch.0.global-batch"),
        (32, Phase(6, per_worker_batch=1), 6, "synchronized", f"{VALUES} 6 values of each channel; set a larger {BOTH}"),
        (
            64,
            Phase(4, image_size=64, per_worker_batch=1),
            4,
            "per_worker",
            f"{VALUES} 4 values of each channel, with images of 64x64; set a larger {WORKER}, or --batch.0.image-size"
            f"{SYNCHRONIZED}",
        ),
    ],
)
def test_warning_of_few_values_names_every_flag_that_helps(size, phase, devices, norm, expected):
    plan = make_plan(small(size, phase, norm=norm), examples=5000, devices=devices)
    assert small_worker_warning(plan, has_batch_norm=True) == f"batch.0: {expected}"
