import dataclasses

import pytest

from jaxdp.config import Config, ConfigError, Mesh, Model, Phase, Schedule
from jaxdp.parallel.mesh import choose_shape, make_mesh, most_square
from jaxdp.planning import as_dict, make_plan, model_summary
from jaxdp.recipes import load_config

NO_MESH = Mesh()


def config_with(*phases, mesh=NO_MESH, epochs=10.0):
    return Config(batch=phases, mesh=mesh, epochs=epochs, schedule=Schedule(warmup_epochs=1.0))


def test_a_plan_has_the_phases_of_the_clock():
    plan = make_plan(config_with(Phase(96, 3.5), Phase(256)), examples=1000, devices=4)
    first, second = plan.phases
    assert (first.first_sample, first.steps, second.first_sample) == (0, 37, 3552)
    assert (second.steps, plan.total_steps, plan.total_samples) == (26, 63, 3552 + 26 * 256)
    assert (first.vertical, first.horizontal, first.per_worker_batch, first.workers) == (2, 2, 24, 4)
    assert [plan.phase_at(s) for s in (0, 3456, 3552, 9000)] == [0, 0, 1, 1]


def test_workers_beyond_the_devices_become_micro_batches():
    (phase,) = make_plan(config_with(Phase(1024, per_worker_batch=32)), 5000, 8).phases
    assert (phase.workers, phase.accumulation, phase.devices, phase.per_device_batch) == (32, 4, 8, 128)


def test_devices_that_cannot_share_the_workers_stay_idle_or_are_refused():
    (phase,) = make_plan(config_with(Phase(160, per_worker_batch=32)), 5000, 8).phases
    assert (phase.devices, phase.idle_devices, phase.accumulation) == (5, 3, 1)
    with pytest.raises(
        ConfigError,
        match=r"mesh.idle: 'refuse' .* on 8 devices; 5 of them can share its 5 workers .* that uses all is 256; or take 5",
    ):
        make_plan(config_with(Phase(160, per_worker_batch=32), mesh=Mesh(idle="refuse")), 5000, 8)


def test_a_batch_that_the_given_mesh_cannot_hold_is_refused_with_the_nearest_that_it_can():
    with pytest.raises(ConfigError) as caught:
        make_plan(config_with(Phase(100), mesh=Mesh(vertical=2, horizontal=4)), 5000, 8)
    assert str(caught.value) == (
        "batch.0.global_batch: 100 is not allowed; its global batch 100 cannot be shared evenly by the 2x4 mesh; "
        "the nearest that can is 96, or leave the mesh to be chosen"
    )


def test_the_nearest_batch_may_be_the_larger_one():
    with pytest.raises(ConfigError, match="the nearest that can is 104"):
        make_plan(config_with(Phase(102), mesh=Mesh(vertical=2, horizontal=4)), 5000, 8)


def test_a_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ConfigError, match="mesh: 4x4 is not allowed; it takes 16 devices and there are 8"):
        make_plan(config_with(Phase(256), mesh=Mesh(vertical=4, horizontal=4)), 5000, 8)


def test_a_run_past_2_to_the_32_samples_is_refused():
    with pytest.raises(ConfigError, match=r"the run would see 51\d{8} samples, and fewer than 2\^32 are allowed"):
        make_plan(config_with(Phase(4096), epochs=4000.0), 1_281_167, 8)


@pytest.mark.parametrize(("devices", "shape"), [(1, (1, 1)), (4, (2, 2)), (8, (2, 4)), (7, (1, 7)), (12, (3, 4))])
def test_one_host_has_the_most_square_mesh(devices, shape):
    assert most_square(devices) == shape
    assert choose_shape(Mesh(), devices) == shape


def test_given_sides_and_hosts_decide_the_mesh():
    assert choose_shape(Mesh(vertical=8), 8) == (8, 1)
    assert choose_shape(Mesh(horizontal=8), 8) == (1, 8)
    assert choose_shape(Mesh(), 32, hosts=4) == (4, 8)
    with pytest.raises(ConfigError, match=r"mesh\.vertical: 3 is not allowed; it must divide the 8 devices"):
        choose_shape(Mesh(vertical=3), 8)


def test_with_one_side_given_the_other_follows_from_what_the_workers_can_use():
    phases = make_plan(config_with(Phase(96, 5.0), Phase(160), mesh=Mesh(horizontal=4)), 5000, 24).phases
    assert [(p.vertical, p.horizontal, p.idle_devices) for p in phases] == [(6, 4, 0), (5, 4, 4)]
    with pytest.raises(ConfigError, match="cannot be shared evenly by the mesh side of 3; the nearest that can is 255"):
        make_plan(config_with(Phase(256), mesh=Mesh(vertical=3)), 5000, 8)


def test_a_mesh_has_the_papers_axes_and_rows_of_consecutive_devices():
    mesh = make_mesh(2, 4)
    assert mesh.axis_names == ("vertical", "horizontal")
    assert [[d.id for d in row] for row in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_learning_rate_of_a_phase_uses_its_batch_and_the_samples_before_the_step():
    config = dataclasses.replace(
        config_with(Phase(256, 5.0), Phase(512)), schedule=Schedule("goyal", 0.1, warmup_epochs=2.0, boundaries=(8.0,))
    )
    plan = make_plan(config, examples=2560, devices=1)
    assert plan.learning_rate(0) == pytest.approx(0.1)
    assert plan.learning_rate(4 * 2560) == pytest.approx(0.1)
    assert plan.learning_rate(5 * 2560) == pytest.approx(0.2)
    assert plan.learning_rate(8 * 2560) == pytest.approx(0.02)


def test_the_json_of_a_plan_has_what_others_rely_on():
    config = load_config("digits")
    printed = as_dict(make_plan(config, 1437, 4), model_summary(config))
    assert set(printed) >= {"phases", "learning_rate", "total_steps", "model", "gradient_bytes"}
    names = {"first_epoch", "last_epoch", "global_batch", "per_worker_batch", "workers", "accumulation", "momentum"}
    assert set(printed["phases"][0]) >= names | {"steps"}
    assert printed["total_steps"] == sum(phase["steps"] for phase in printed["phases"])
    assert printed["gradient_bytes"] == 4 * printed["model"]["parameters"]
    rates = dict(printed["learning_rate"])
    assert max(rates.values()) <= config.schedule.learning_rate
    assert rates[0.0] == config.schedule.start


def test_a_16_bit_wire_halves_the_gradient():
    config = load_config("digits", ["--reduce.wire-dtype", "bfloat16", "--model.depth", "18"])
    assert model_summary(config)["gradient_bytes"] == 2 * model_summary(config)["parameters"]
    assert model_summary(Config(model=Model()))["gradient_bytes"] == 102_228_128


def test_a_batch_larger_than_the_data_set_is_refused():
    assert make_plan(config_with(Phase(1000)), 1000, 4).phases[0].global_batch == 1000
    with pytest.raises(ConfigError, match=r"batch.0.global_batch: 1001 is not allowed; the training set has only 1000 images"):
        make_plan(config_with(Phase(1001)), 1000, 1)


@pytest.mark.parametrize("side", ["vertical", "horizontal"])
def test_a_mesh_side_longer_than_the_devices_names_the_devices(side):
    config = Config(mesh=Mesh(**{side: 16}))
    with pytest.raises(ConfigError, match=rf"mesh.{side}: 16 is not allowed; there are 8 devices; give at most 8"):
        make_plan(config, 4096, 8)
