"""Registered tasks: gradients beside NumPy in float64 on several meshes, whole runs, and what is refused."""

import dataclasses
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.images import encode
from helpers.runs import Recorder, train_shown, train_until
from helpers.step import BATCH, PER_WORKER, PIXELS, distributed_gradients, initial_params, make_batch, step_config, with_parts
from PIL import Image

import jaxdp
from jaxdp.choices import TASKS
from jaxdp.cli.main import main
from jaxdp.config import Data, Model, Optimizer, Phase
from jaxdp.data.augment import augment, normalize
from jaxdp.data.batch_sources import DataError
from jaxdp.data.sources import open_datasets
from jaxdp.errors import ConfigError
from jaxdp.inference.checkpoints import choose_checkpoint, delete_all_but, list_checkpoints
from jaxdp.metrics import METRICS
from jaxdp.report.summary import report
from jaxdp.run_records import read_log
from jaxdp.targets import BadTarget, Target

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
MODES = [
    {},
    {"overlap": False},
    {"overlap": False, "update": "sharded"},
    {"update": "sharded"},
    {"wire_dtype": "bfloat16"},
]


class TwoHeads(nn.Module):
    """Two linear heads: a kind of 7, and a place."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        return {"kind": nn.Dense(7, name="kind")(x), "place": nn.Dense(2, name="place")(x)}


TARGETS = {"kind": np.int32(0), "place": np.zeros(2, np.float32)}


def loss_of_both(outputs, targets, constants):
    """Cross entropy of the kind, and squared error of the place times a weight."""
    kind = -jnp.take_along_axis(jax.nn.log_softmax(outputs["kind"]), targets["kind"][:, None], axis=-1)[:, 0]
    return kind + constants["weight"] * ((outputs["place"] - targets["place"]) ** 2).mean(-1)


def is_kind(outputs, targets):
    return outputs["kind"].argmax(-1) == targets["kind"]


def distance(outputs, targets):
    return np.linalg.norm(np.float64(outputs["place"]) - targets["place"], axis=-1).max()


@pytest.fixture
def both(own_programs) -> None:
    jaxdp.register_model("two_heads", TwoHeads())
    task = jaxdp.Task(
        loss=loss_of_both,
        targets=TARGETS,
        metrics={"kind": is_kind, "distance": jaxdp.Metric(distance, higher_is_better=False, of="all")},
        constants={"weight": np.float32(3.0)},
    )
    jaxdp.register_task("both", task)


def both_batch():
    random = np.random.default_rng(2)
    batch = make_batch()
    return batch | {"labels": {"kind": batch["labels"], "place": random.normal(size=(BATCH, 2)).astype(np.float32)}}


def float64_gradient(config, batch):
    """The mean gradient of `loss_of_both` with respect to the heads, and the mean loss, in NumPy."""
    images = normalize(augment(config, batch["images"], batch["positions"]), *PIXELS)
    x = np.asarray(images, np.float64).reshape(BATCH, -1)
    params = jax.tree.map(np.float64, jax.device_get(initial_params(config)[0]))
    (heads,) = params.values()
    kind, place = (x @ heads[name]["kernel"] + heads[name]["bias"] for name in ("kind", "place"))
    shares = np.exp(kind - kind.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    hot, error = np.eye(7)[batch["labels"]["kind"]], place - batch["labels"]["place"]
    loss = -np.log((shares * hot).sum(-1)) + 3 * (error**2).mean(-1)
    of_outputs = {"kind": (shares - hot) / BATCH, "place": 3 * error / BATCH}
    return {name: {"kernel": x.T @ g, "bias": g.sum(0)} for name, g in of_outputs.items()}, loss.mean()


CASES = [
    pytest.param(shape, mode, marks=[] if shape == (2, 4) or not mode else pytest.mark.slow)
    for shape in MESHES
    for mode in MODES
    if shape != (1, 1) or not mode
]


@pytest.mark.parametrize(("mesh_shape", "reduce"), CASES)
@pytest.mark.parametrize("accumulation", [False, True])
def test_gradient_of_a_task_with_two_outputs_equals_numpy_in_float64(both, mesh_shape, reduce, accumulation):
    devices = mesh_shape[0] * mesh_shape[1]
    config = dataclasses.replace(step_config(task="both"), model=Model(name="two_heads", classes=1))
    config = with_parts(config, optimizer={"label_smoothing": 0.0}, reduce=reduce)
    batch = both_batch()
    count = BATCH // PER_WORKER // devices if accumulation else 1
    constants = {"weight": jnp.float32(3.0)}
    found, report = distributed_gradients(config, mesh_shape, count, batch=batch, constants=constants)
    expected, loss = float64_gradient(config, batch)
    exact = "wire_dtype" not in reduce
    assert float(report["loss"]) == pytest.approx(loss, rel=1e-6)
    (found,) = found.values()
    for name, head in expected.items():
        for part, value in head.items():
            error = np.linalg.norm(np.float64(found[name][part]) - value) / np.linalg.norm(value)
            assert error < (1e-5 if exact else 1e-2), (name, part)


def places(count: int, seed: int):
    """Images with a bright square of one of three sizes somewhere, and the kind and the place of it."""
    random = np.random.default_rng(seed)
    kind, place = random.integers(0, 3, count).astype(np.int64), random.uniform(0, 1, (count, 2))
    images = random.integers(0, 60, (count, 16, 16, 3))
    for image, size, (y, x) in zip(images, kind, (8 * place).astype(int), strict=True):
        image[y : y + 3 + size, x : x + 3 + size] += 150
    return images.astype(np.uint8), {"kind": kind, "place": place}


class Items:
    """The same as items (image, target)."""

    def __init__(self, arrays) -> None:
        self.images, self.targets = arrays

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], {name: values[index] for name, values in self.targets.items()}


@pytest.fixture
def config(tiny, both):
    """A run of `tiny` on places."""
    given = {"source": "given", "train_examples": None, "eval_examples": None}
    own = dataclasses.replace(tiny, task="both", model=Model(name="two_heads"))
    return with_parts(own, data=given, optimizer={"label_smoothing": 0.0}, schedule={"learning_rate": 0.01})


def test_run_of_a_registered_task_from_arrays_and_items_resumes_bitwise(config, tmp_path):
    arrays = places(50, 0), places(23, 1)
    items = tuple(map(Items, arrays))
    result = train_shown(config, tmp_path / "whole", screen=Recorder(), datasets=arrays)
    train_until(config, tmp_path / "stopped", step=10, datasets=items)
    again = train_shown(config, tmp_path / "stopped", screen=Recorder(), datasets=items)
    assert [*result.metrics] == ["kind", "distance"]
    assert (again.metrics, again.loss, again.eval_examples) == (result.metrics, result.loss, 23)
    records, others = (
        [record for record in read_log(tmp_path / name / "metrics.jsonl") if "loss" in record] for name in ("whole", "stopped")
    )
    assert [record["loss"] for record in records] == [record["loss"] for record in others]
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert 0 <= records[0]["kind"] <= 1
    found = jaxdp.evaluate(None, tmp_path / "whole", datasets=arrays)
    assert found["eval_distance"] == pytest.approx(result.distance, rel=1e-6)
    assert found["eval_kind"] == result.kind


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_evaluation_of_all_images_is_exact_on_devices_that_do_not_divide_them(config, tmp_path, devices):
    arrays = places(48, 0), places(23, 1)
    one_phase = (Phase(global_batch=24 if devices == 3 else 16),)
    config = with_parts(dataclasses.replace(config, epochs=2.0, batch=one_phase), mesh={"cpu_devices": devices})
    held_out = []

    class Keep(jaxdp.Callback):
        def after_evaluation(self, run, metrics):
            held_out.append((run.predict_held_out(), metrics))

    jaxdp.train(config, tmp_path, datasets=arrays, callbacks=[Keep()])
    found, metrics = held_out[-1]
    targets = arrays[1][1]
    assert found.positions.tolist() == list(range(23))
    np.testing.assert_array_equal(found.labels["kind"], targets["kind"])
    assert metrics["eval_distance"] == pytest.approx(distance(found.logits, {"place": np.float32(targets["place"])}), rel=1e-6)
    assert metrics["eval_kind"] == np.mean(found.logits["kind"].argmax(-1) == targets["kind"])
    losses = loss_of_both(*jax.tree.map(jnp.asarray, (found.logits, dict(found.labels))), {"weight": 3.0})
    assert metrics["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-6)


class Linear(nn.Module):
    """One linear layer."""

    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


def test_loss_with_images_and_a_teacher_as_constants_has_the_metrics_of_classes(tiny, tmp_path, own_programs):
    """Distillation: the loss of a student that starts as its teacher is the entropy of the teacher's probabilities."""
    jaxdp.register_model("linear", Linear)
    teacher_config = dataclasses.replace(tiny, model=Model(name="linear", classes=6), epochs=2.0)
    jaxdp.train(teacher_config, tmp_path / "teacher")
    params = jaxdp.load_params(tmp_path / "teacher")["params"]

    def distill(outputs, targets, images, constants):
        wanted = Linear(6).apply({"params": constants}, images)
        return -(jax.nn.softmax(wanted / 2) * jax.nn.log_softmax(outputs / 2)).sum(-1) + 0 * targets.sum(-1)

    jaxdp.register_task("distill", jaxdp.Task(loss=distill, like="classes", constants=params))
    config = dataclasses.replace(teacher_config, task="distill")
    result = jaxdp.train(with_parts(config, data={"mix": "mixup"}), tmp_path / "student", initial_params={"params": params})
    assert [*result.metrics] == ["accuracy", "top5"]
    first = next(record for record in read_log(tmp_path / "student/metrics.jsonl") if "loss" in record)
    assert 0 < first["loss"] < np.log(6)
    assert jaxdp.predict(tmp_path / "student", np.zeros((2, 16, 16, 3), np.uint8)).classes.shape == (2, 5)


def plain(**changes):
    return jaxdp.Task(**{"loss": lambda o, t: ((o - t) ** 2).mean(-1), "targets": np.zeros(2, np.float32)} | changes)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (lambda: "both", "str is no jaxdp.Task"),
        (lambda: plain(loss=3), "int.* cannot be called"),
        (lambda: plain(targets=None), "needs `targets`, or `like`"),
        (lambda: plain(like="classes"), "has `targets` as well as `like`"),
        (lambda: plain(targets=2), r"targets: must be arrays of numbers, not an instance of int"),
        (lambda: plain(targets=None, like="boxes"), "like='boxes': must be a built-in task"),
        (lambda: plain(metrics={"accuracy": is_kind}), "name='accuracy': reserved"),
        (lambda: plain(constants={"weight": 1.0, "name": "a"}), "constants: .*give a tree of arrays of numbers"),
    ],
)
def test_task_that_cannot_be_registered_is_refused(task, reason):
    with pytest.raises(ConfigError, match=reason):
        jaxdp.register_task("numbers", task())


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ({}, {"optimizer": {"label_smoothing": 0.1}}, r"optimizer\.label_smoothing=0\.1: .*Task\(smooth="),
        ({}, {"data": {"mix": "mixup"}}, r"data\.mix='mixup': .*Task\(mix="),
        ({}, {"optimizer": {"loss": "binary"}}, r"optimizer\.loss='binary': not used with task='numbers'"),
        ({"loss": lambda o, t: ((o - t) ** 2).mean()}, {}, r"returned an array of shape \(\) for 3 images; return the loss"),
        ({"loss": lambda o, t: o["place"]}, {}, r"register_task='numbers': the registered function failed"),
        ({"metrics": {"error": lambda o, t: 1 / 0}}, {}, r"register_metric='error': the registered function failed"),
        (
            {"metrics": {"error": lambda o, t: 0.5}},
            {},
            r"register_metric='error': returned float for 3 images; return the value",
        ),
        ({"metrics": {"error": lambda o, t: o.mean()}}, {}, r"register_metric='error': returned an array of shape \(\) for 3"),
        ({"mix": lambda t, o: t}, {"data": {"mix": "mixup"}}, r"register_task='numbers': the registered function failed"),
    ],
)
def test_task_that_does_not_fit_is_named_before_the_run(tiny, tmp_path, task, changes, reason, own_programs):
    jaxdp.register_task("numbers", plain(**task))
    jaxdp.register_model("linear", Linear)
    config = dataclasses.replace(tiny, task="numbers", model=Model(name="linear"))
    config = with_parts(
        config,
        data={"source": "given", "train_examples": None, "eval_examples": None} | changes.get("data", {}),
        optimizer={"label_smoothing": 0.0} | changes.get("optimizer", {}),
    )
    images, targets = places(16, 0)
    pair = images, targets["place"]
    with pytest.raises(ConfigError, match=reason):
        jaxdp.train(config, tmp_path / "run", datasets=(pair, pair))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t | {"place": np.where(np.arange(16)[:, None] == 5, np.nan, t["place"])}, "nan as 'place'"),
        (lambda t: t | {"place": t["place"] + 1e39}, r"has 1e\+39 as 'place', and not a finite float32"),
        (lambda t: t | {"kind": t["kind"] + 2**31}, r"has 21474836\d\d as 'kind', and not a whole number"),
        (lambda t: t | {"place": t["place"][:, :1]}, r"float64 of shape \(1,\) as 'place', and not float32 of shape \(2,\)"),
        (lambda t: t | {"kind": t["place"][:, 0]}, r"has 0\.\d+ as 'kind', and not a whole number of 32 bits"),
        (lambda t: {"kind": t["kind"]}, "has kind, and not a mapping with kind, place"),
        (lambda t: t["kind"], "is .*array.*, and not a mapping with kind, place"),
    ],
)
@pytest.mark.parametrize("as_items", [False, True])
def test_wrong_targets_are_named(config, tmp_path, change, reason, as_items):
    images, targets = places(16, 0)
    wrong = change(targets)
    data = (images, wrong)
    if as_items:
        if not isinstance(wrong, dict):
            data = list(zip(images, wrong, strict=True))
        else:
            data = Items((images, wrong))
    with pytest.raises((ConfigError, DataError), match=reason) as caught:
        jaxdp.train(config, tmp_path / "run", datasets=(data, data))
    assert "\n" not in str(caught.value)
    if as_items:
        assert re.search(r"image \d+", str(caught.value))


def test_too_few_targets_are_named_with_both_shapes():
    target = Target(np.dtype((np.float32, (2,))))
    with pytest.raises(BadTarget, match=r"float32 of shape \(20, 2\), and not float32 of shape \(50, 2\)"):
        target.all_of(np.zeros((20, 2), np.float32), 50)


def test_loader_gives_the_targets_of_a_registered_task(both):
    images, targets = places(16, 0)
    with jaxdp.data.Loader((images, targets), 8, mesh=jaxdp.make_mesh(2, 2), task="both") as loader:
        batch = next(loader)
    rows = [int(np.flatnonzero((images == image).all((1, 2, 3)))[0]) for image in np.asarray(batch["images"])]
    np.testing.assert_array_equal(batch["labels"]["kind"], targets["kind"][rows])
    np.testing.assert_array_equal(batch["labels"]["place"], np.float32(targets["place"][rows]))


def test_prediction_of_a_registered_task_is_its_outputs_and_a_text(config, tmp_path, capsys):
    task = jaxdp.Task(
        loss=loss_of_both, targets=TARGETS, show=lambda o: f"kind {o['kind'].argmax()}", constants={"weight": 3.0}
    )
    jaxdp.register_task("both", task)
    arrays = places(16, 0), places(8, 1)
    jaxdp.train(config, tmp_path / "run", datasets=arrays)
    found = jaxdp.predict(tmp_path / "run", arrays[1][0])
    assert found.scores["kind"].shape == (8, 7)
    assert found.names == [[f"kind {kind}"] for kind in found.scores["kind"].argmax(-1)]
    assert found.classes.shape == found.probabilities.shape == (8, 0)
    Image.fromarray(arrays[1][0][0]).save(tmp_path / "image.png")
    capsys.readouterr()
    main(["predict", "--workdir", str(tmp_path / "run"), "--json", str(tmp_path / "image.png")])
    (only,) = json.loads(capsys.readouterr().out)["predictions"]
    ((prediction, outputs),) = [one.values() for one in only["top"]]
    assert prediction == found.names[0][0]
    for name, scores in found.scores.items():
        np.testing.assert_allclose(outputs[name], scores[0], atol=1e-5)
    with pytest.raises(ConfigError, match=r"--top=3: not possible with task='both'; omit it"):
        jaxdp.predict(tmp_path / "run", arrays[1][0], top=3)


def test_best_checkpoint_of_a_task_that_is_not_registered_is_not_guessed(config, tmp_path):
    """Its first metric decides, and without the task nobody knows which one that is."""
    config = dataclasses.replace(config, epochs=2.0)
    jaxdp.train(config, tmp_path, datasets=(places(48, 0), places(8, 1)))
    assert report(tmp_path)["best_epoch"] is not None
    TASKS.remove("both")
    before = sorted((tmp_path / "checkpoints").iterdir())
    for use in (list_checkpoints, lambda run: delete_all_but(run, ["best"]), lambda run: choose_checkpoint(run, "best")):
        with pytest.raises(ConfigError, match=r"task='both': unknown name.*--config"):
            use(tmp_path)
    assert sorted((tmp_path / "checkpoints").iterdir()) == before
    assert choose_checkpoint(tmp_path, "newest").samples == max(int(path.name) for path in before)
    assert report(tmp_path)["best_epoch"] is None


@pytest.mark.parametrize("columns", [("x", "y"), ("pair",)])
def test_targets_come_from_columns_of_a_table(tmp_path, columns):
    import pyarrow as pa
    from pyarrow import parquet

    jaxdp.register_task("numbers", plain())
    images, targets = places(6, 0)
    place = targets["place"].astype(np.float32)
    encoded = [encode(image, "PNG") for image in images]
    cells = {"x": place[:, 0], "y": place[:, 1]} if len(columns) == 2 else {"pair": place.tolist()}
    for split in ("train", "val"):
        parquet.write_table(pa.table({"image": encoded, **cells}), tmp_path / f"{split}.parquet")
    data = Data(source="file", directory=str(tmp_path), image_size=16, label_column=columns)
    opened = open_datasets(dataclasses.replace(jaxdp.Config(), task="numbers", data=data))
    np.testing.assert_array_equal(opened.train.labels, place)
    np.testing.assert_array_equal(opened.train.images, images)
    parquet.write_table(
        pa.table({"image": encoded, **{name: [None, *cells[name][1:]] for name in cells}}), tmp_path / "val.parquet"
    )
    with pytest.raises(ConfigError, match=r"row 1 has the target .*None.*; targets are numbers"):
        open_datasets(dataclasses.replace(jaxdp.Config(), task="numbers", data=data))


def test_outputs_have_the_shape_of_targets_of_equally_many_numbers():
    """A network's [B, 1] against targets [B] would broadcast to [B, B]."""
    error = jaxdp.Metric(lambda outputs, targets: outputs - targets)
    jaxdp.register_task("number", jaxdp.Task(loss=lambda o, t: (o - t) ** 2, targets=np.float32(0), metrics={"error": error}))
    outputs, targets = np.array([[1.0], [3.0]], np.float32), np.array([0.0, 1.0], np.float32)
    loss = TASKS.implementation("number").loss(Optimizer(), outputs, targets)
    np.testing.assert_array_equal(loss, [1.0, 4.0])
    np.testing.assert_array_equal(METRICS.implementation("eval_error")(outputs, targets), [1.0, 2.0])


def test_a_metric_belongs_to_one_task():
    metrics = {"error": lambda outputs, targets: (outputs - targets).mean(-1)}
    jaxdp.register_task("one", plain(metrics=metrics))
    jaxdp.register_task("one", plain(metrics=metrics))
    with pytest.raises(ConfigError, match="name='error': a metric of the task 'one'; choose a different name"):
        jaxdp.register_task("two", plain(metrics=metrics))
