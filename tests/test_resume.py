"""Runs that are cut off and go on: bit by bit what they would have been."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import ConfigError, Stopped, TrainingError, train
from jaxdp.config import Checkpoint, Data, Mesh, Phase
from jaxdp.data.loader import DataError
from jaxdp.training import checkpoint, seal
from jaxdp.training.console import Quiet
from jaxdp.training.metrics import TIMING, read_log
from jaxdp.training.stop import Signals


class Cut(Exception):
    """What a test cuts a run off with: nothing is saved, as in a kill."""


class CutAt(Quiet):
    """Cuts a run off when it has logged a step, or evaluates the samples given."""

    def __init__(self, step=None, evaluated=None):
        self.at, self.samples, self.said = step, evaluated, []

    def say(self, text):
        self.said.append(text)

    def step(self, record):
        if record["step"] == self.at:
            raise Cut

    def evaluated(self, record):
        if record["samples"] == self.samples:
            raise Cut


def without_timing(record):
    return {name: value for name, value in record.items() if name not in TIMING}


def told(workdir):
    """Everything a run has to tell that does not depend on time: its log, its result, the digests of its last state."""
    result = json.loads((workdir / "result.json").read_text())
    last = seal.newest_good(workdir / "checkpoints")
    return (
        [
            {name: value for name, value in record.items() if name not in TIMING}
            for record in read_log(workdir / "metrics.jsonl")
        ],
        without_timing(result) | {"workdir": None},
        last.samples,
        last.arrays,
    )


@pytest.fixture
def uninterrupted(tiny, tmp_path):
    train(tiny, tmp_path / "whole")
    return told(tmp_path / "whole")


@pytest.mark.parametrize(
    "cuts",
    [
        [{"step": 1}],
        pytest.param([{"step": 7}], marks=pytest.mark.slow),
        [{"step": 8}, {"step": 9}],
        pytest.param([{"step": 11}], marks=pytest.mark.slow),
        [{"evaluated": 56}],
        [{"evaluated": 160}],
        [{"step": 3}, {"step": 5}, {"step": 12}, {"step": 15}],
    ],
)
def test_a_run_that_is_cut_off_goes_on_bit_by_bit(tiny, tmp_path, uninterrupted, cuts):
    """50 images an epoch, steps of 8 then 16: checkpoints at 56, 80 (a change of phase), 112 and 160 samples."""
    for cut in cuts:
        with pytest.raises(Cut):
            train(tiny, tmp_path / "cut", screen=CutAt(**cut))
        assert not (tmp_path / "cut/result.json").exists()
    train(tiny, tmp_path / "cut")
    assert told(tmp_path / "cut") == uninterrupted


def test_a_run_goes_on_at_its_newest_checkpoint_and_says_so(tiny, tmp_path):
    with pytest.raises(Cut):
        train(tiny, tmp_path, screen=CutAt(step=12))
    screen = CutAt()
    assert train(tiny, tmp_path, screen=screen).sessions == 2
    assert [text for text in screen.said if "going on" in text] == [
        f"going on from {tmp_path / 'checkpoints/80'}: epoch 1.60, 10 steps"
    ]


@pytest.mark.parametrize("moment", ["compiling", "evaluating", 3, 10, 15])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_by_bit(tiny, tmp_path, uninterrupted, moment):
    class Ask(Quiet):
        def busy(self, what):
            if what == moment:
                signals.asked = "SIGTERM"

        def step(self, record):
            if record["step"] == moment:
                signals.asked = "SIGTERM"

    signals = Signals()
    with pytest.raises(Stopped) as stopped:
        train(tiny, tmp_path / "run", screen=Ask(), signals=signals)
    if moment == "compiling":
        assert str(stopped.value) == "stopped by SIGTERM before the first step; the same command begins again"
    else:
        assert "the same command goes on from it" in str(stopped.value)
        saved = seal.newest_good(tmp_path / "run/checkpoints")
        assert saved.told["progress"]["evaluation_due"] == (moment in ("evaluating", 15))
        assert saved.samples == {"evaluating": 56, 3: 32, 10: 80, 15: 160}[moment]  # between steps, one is ahead of the log
    train(tiny, tmp_path / "run")
    assert told(tmp_path / "run") == uninterrupted


@pytest.mark.slow
def test_averages_loss_scale_and_counts_go_on_too(tiny, tmp_path):
    config = dataclasses.replace(
        tiny,
        optimizer=dataclasses.replace(tiny.optimizer, average_decay=0.9),
        model=dataclasses.replace(tiny.model, dtype="float16"),
        loss_scale=dataclasses.replace(tiny.loss_scale, name="dynamic", initial=2.0**24, growth_steps=4),
    )
    train(config, tmp_path / "whole")
    for step in (9, 12):
        with pytest.raises(Cut):
            train(config, tmp_path / "cut", screen=CutAt(step=step))
    train(config, tmp_path / "cut")
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    assert told(tmp_path / "cut")[1]["skipped_steps"] > 0


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(cpu_devices=2),
        pytest.param(Mesh(1, 4, cpu_devices=4), marks=SLOW),
        pytest.param(Mesh(4, 1, cpu_devices=8), marks=SLOW),
    ],
)
def test_on_another_mesh_order_rate_and_phases_are_exact_and_parameters_agree(tiny, tmp_path, mesh):
    """Batch normalisation per worker of 2 images; 20 steps after the resume in float32."""
    config = dataclasses.replace(
        tiny, epochs=8.0, batch=(Phase(8, 1.5, per_worker_batch=2), Phase(16, per_worker_batch=2)),
    )  # fmt: skip
    with pytest.raises(Cut):
        train(config, tmp_path / "here", screen=CutAt(step=12))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    train(config, tmp_path / "here")
    train(dataclasses.replace(config, mesh=mesh), tmp_path / "there")
    exact = ("step", "samples", "epoch", "phase", "learning_rate", "momentum", "global_batch")

    def followed(name):
        lines = read_log(tmp_path / name / "metrics.jsonl")
        return [{field: line[field] for field in exact} for line in lines if "loss" in line]

    here, there = followed("here"), followed("there")
    assert here == there
    assert len(here) - 10 >= 20
    one, other = (parameters(tmp_path / d, config) for d in ("here", "there"))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.linalg.norm(a - b), 0, atol=1e-4 * max(np.linalg.norm(a), 1e-3))


def parameters(workdir, config):
    from jaxdp.training.restored import restored

    return jax.tree.map(np.asarray, restored(workdir, config=config)[0].params)


def test_a_changed_configuration_is_shown_and_refused_unless_accepted(tiny, tmp_path):
    with pytest.raises(Cut):
        train(tiny, tmp_path, screen=CutAt(step=12))
    changed = dataclasses.replace(tiny, schedule=dataclasses.replace(tiny.schedule, learning_rate=1.0))
    with pytest.raises(ConfigError, match=r"different run \(schedule.learning_rate: 2.0 -> 1.0\).*--accept-changes"):
        train(changed, tmp_path)
    screen = CutAt()
    train(changed, tmp_path, screen=screen, accept_changes=True)
    assert "going on with changes: schedule.learning_rate: 2.0 -> 1.0" in screen.said
    rates = [record["learning_rate"] for record in read_log(tmp_path / "metrics.jsonl") if "loss" in record]
    whole = jaxdp.plan(tiny), jaxdp.plan(changed)
    assert rates == [whole[n >= 10].learning_rate(8 * n if n < 10 else 80 + 16 * (n - 10)) for n in range(15)]


def test_what_does_not_change_the_run_may_be_changed(tiny, tmp_path):
    with pytest.raises(Cut):
        train(tiny, tmp_path, screen=CutAt(step=12))
    config = dataclasses.replace(
        tiny, checkpoint=Checkpoint(every_samples=32, keep=9), logging=dataclasses.replace(tiny.logging, every_steps=5)
    )
    train(config, tmp_path)
    assert [int(path.name) for path in seal.directories(tmp_path / "checkpoints")][:3] == [160, 128, 112]


def test_another_model_cannot_go_on_from_a_checkpoint(tiny, tmp_path):
    with pytest.raises(Cut):
        train(tiny, tmp_path, screen=CutAt(step=12))
    wider = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, width=8))
    with pytest.raises(ConfigError, match=r"holds for .* float32 of shape .*, and the run wants float32 of shape"):
        train(wider, tmp_path, accept_changes=True)


def test_a_finished_run_can_be_made_longer(tiny, tmp_path):
    train(tiny, tmp_path)
    longer = dataclasses.replace(tiny, epochs=4.0)
    result = train(longer, tmp_path, accept_changes=True)
    assert (result.steps, result.samples) == (18, 208)  # three more of 16, to 4 epochs of 50


def test_a_run_goes_on_from_another_ones_checkpoint_in_a_directory_of_its_own(tiny, tmp_path, uninterrupted):
    with pytest.raises(Cut):
        train(tiny, tmp_path / "first", screen=CutAt(step=12))
    train(tiny, tmp_path / "second", resume=str(tmp_path / "first"))
    assert told(tmp_path / "second") == uninterrupted
    train(tiny, tmp_path / "third", resume=str(tmp_path / "first/checkpoints/56"))
    assert told(tmp_path / "third") == uninterrupted
    with pytest.raises(Cut):
        train(tiny, tmp_path / "fourth", resume=str(tmp_path / "first/checkpoints/56"), screen=CutAt(step=12))
    screen = CutAt()
    train(tiny, tmp_path / "fourth", resume=str(tmp_path / "first/checkpoints/56"), screen=screen)
    assert told(tmp_path / "fourth") == uninterrupted
    assert any("fourth/checkpoints/80" in text for text in screen.said)  # its own newest, not the origin again


@pytest.mark.parametrize(
    ("origin", "change", "message"),
    [
        ("nowhere", {}, "'.*nowhere' is not allowed; it holds no sound checkpoint"),
        ("first", {"seed": 4}, r"it is of a different run \(seed: 0 -> 4\); give --accept-changes"),
        ("new", {}, "it belongs to this run's own directory; give a new --workdir"),
        ("new/checkpoints/80", {}, "it belongs to this run's own directory"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(tiny, tmp_path, origin, change, message):
    with pytest.raises(Cut):
        train(tiny, tmp_path / "first", screen=CutAt(step=9))
    with pytest.raises(ConfigError, match=message) as caught:
        train(dataclasses.replace(tiny, **change), tmp_path / "new", resume=str(tmp_path / origin))
    assert "\n" not in str(caught.value)


# damage


def files_of(workdir, samples):
    folder = workdir / "checkpoints" / str(samples)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", ["flipped", *(pytest.param(one, marks=SLOW) for one in ("truncated", "deleted"))])
def test_every_file_of_a_checkpoint_damaged_in_turn_is_named_and_the_one_before_taken(tiny, tmp_path, damage):
    """Nothing is silently wrong: the file and the step are named, and the state is that of the checkpoint before."""
    with pytest.raises(Cut):
        train(tiny, tmp_path / "run", screen=CutAt(step=13))
    folder = tmp_path / "run/checkpoints"
    names = files_of(tmp_path / "run", 112 if (folder / "112").exists() else 80)
    newest, older = [int(path.name) for path in seal.directories(folder)][:2]
    assert "seal.json" in names
    assert len(names) > 5
    _, abstract = abstract_of(tiny)
    for name in names:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "copy/checkpoints")
        victim = tmp_path / "copy/checkpoints" / str(newest) / name
        if victim.stat().st_size == 0 and damage != "deleted":
            continue
        DAMAGES[damage](victim)
        said = []
        kept = checkpoint.Checkpoints(tmp_path / "copy/checkpoints", tiny.checkpoint, said.append)
        _, sealed = kept.restore(lambda samples: abstract)
        assert sealed.samples == older, name
        assert f"checkpoint of samples {newest} is not used: {victim}" in said[0], said
        assert (tmp_path / f"copy/checkpoints/{newest}.damaged").is_dir()


def abstract_of(config):
    from jaxdp import models
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training.state import abstract_state

    mesh = make_mesh(2, 2)
    return mesh, abstract_state(config, models.create(config.model), mesh)


def test_a_run_with_a_damaged_checkpoint_still_ends_bit_by_bit(tiny, tmp_path, uninterrupted):
    with pytest.raises(Cut):
        train(tiny, tmp_path / "run", screen=CutAt(step=13))
    newest = seal.directories(tmp_path / "run/checkpoints")[0]
    flip(max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    screen = CutAt()
    train(tiny, tmp_path / "run", screen=screen)
    assert any("is not used" in text for text in screen.said)
    assert told(tmp_path / "run") == uninterrupted


def test_an_array_that_was_changed_with_its_checksums_is_still_found(tiny, tmp_path):
    """The digests of the arrays do not rest on those of the files: here the files are another run's, sealed as one's own."""
    for seed in (0, 1):
        with pytest.raises(Cut):
            train(dataclasses.replace(tiny, seed=seed), tmp_path / str(seed), screen=CutAt(step=12))
    ours, theirs = (seal.newest_good(tmp_path / str(seed) / "checkpoints") for seed in (0, 1))
    forged = dataclasses.replace(theirs, arrays=ours.arrays)
    with pytest.raises(seal.Damaged, match=r"the array .* is not what was saved"):
        checkpoint.load(forged, abstract_of(tiny)[1])


def test_where_every_checkpoint_is_damaged_the_run_stops_and_does_not_begin_anew(tiny, tmp_path):
    with pytest.raises(Cut):
        train(tiny, tmp_path, screen=CutAt(step=12))
    log = (tmp_path / "metrics.jsonl").read_bytes()
    for path in seal.directories(tmp_path / "checkpoints"):
        (path / "seal.json").unlink()
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is sound .*seal.json cannot be read.*--resume never"):
        train(tiny, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


def test_a_run_that_a_bad_image_stops_is_saved_where_it_stood(tiny, tmp_path):
    class Breaks:
        broken = True

        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 7 and self.broken:
                return b"broken", 0
            return np.full((20, 24), 30 * (index % 6), np.uint8), index % 6

    config = dataclasses.replace(tiny, batch=(Phase(8),), data=Data(image_size=80, augmentation="none"))
    source = Breaks()
    with pytest.raises(
        DataError, match=r"training image 7 cannot be used: .*; (the last good checkpoint|there is no checkpoint)"
    ):
        train(config, tmp_path / "cut", datasets=(source, source))
    source.broken = False
    train(config, tmp_path / "cut", datasets=(source, source))
    train(config, tmp_path / "whole", datasets=(source, source))
    assert told(tmp_path / "cut") == told(tmp_path / "whole")


def test_small_images_and_folders_resume_with_the_list_of_bad_images(tiny, tmp_path):
    class Own:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 7:
                return b"broken", 0
            return np.full((20, 24), 30 * (index % 6), np.uint8), index % 6

    data = Data(image_size=80, augmentation="none", on_bad_image="skip")
    config = dataclasses.replace(tiny, epochs=2.0, batch=(Phase(8),), data=data)
    config = dataclasses.replace(config, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    with pytest.raises(Cut):
        train(config, tmp_path / "cut", datasets=(Own(), Own()), screen=CutAt(step=7))
    train(config, tmp_path / "cut", datasets=(Own(), Own()))
    train(config, tmp_path / "whole", datasets=(Own(), Own()))
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    assert list(told(tmp_path / "cut")[1]["bad_images"]) == ["training image 7", "evaluation image 7"]
