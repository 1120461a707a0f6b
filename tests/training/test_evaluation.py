import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import Recorder, train_shown
from helpers.step import with_parts
from sklearn.metrics import confusion_matrix, log_loss, top_k_accuracy_score

from jaxdp import models
from jaxdp.config import Config, Data, Model, Optimizer
from jaxdp.data import prefetch
from jaxdp.data.augment import normalize
from jaxdp.data.synthetic import SyntheticSource
from jaxdp.distributed.signal_handler import StopTraining
from jaxdp.errors import TrainingError
from jaxdp.inference.evaluate import Confusion
from jaxdp.parallel.mesh import make_mesh
from jaxdp.run_records import read_log
from jaxdp.targets import UNUSABLE
from jaxdp.training import request_flags
from jaxdp.training.evaluation import ExampleCollector, evaluate, make_evaluation_step

CONFIG = Config(
    data=Data(source="synthetic", image_size=12),
    model=Model(depth=6, width=4, stem="small", classes=9),
    optimizer=Optimizer(label_smoothing=0.1, class_weights=tuple(range(1, 10))),  # of training only
)
SOURCE = SyntheticSource(53, 12, 9, seed=0, split=1)
PIXELS = (127.5, 50.0)


class IgnoringSome(SyntheticSource):
    """Every fifth image cannot be read."""

    def batch(self, indices, positions=None):
        images, labels = super().batch(indices, positions)
        return images, np.where(np.asarray(indices) % 5 == 0, UNUSABLE, labels)


@pytest.fixture(scope="module")
def trained():
    model = models.create(CONFIG.model)
    params, stats = jax.jit(lambda: model.init(jax.random.key(0), (12, 12, 3)))()
    return model, jax.tree.map(lambda p: jnp.asarray(np.asarray(p) + np.float32(0.1)), params), stats


@pytest.mark.parametrize("last_batch", [False, True])
def test_a_request_of_one_device_is_read_within_two_batches_of_an_evaluation_or_at_its_end(trained, last_batch):
    """As a stop that a different process asks for: `before_batch` raises once the processes have agreed on it."""
    model, params, stats = trained
    mesh = make_mesh(2, 4)
    step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
    asked, read = 7 if last_batch else 2, []  # of seven batches

    def before_batch() -> dict[str, jax.Array]:
        if request_flags.STOP in read:
            raise StopTraining
        before_batch.count += 1
        requests = np.zeros(8, np.int32)
        requests[5] = request_flags.STOP if before_batch.count == asked else request_flags.NONE
        return {request_flags.BATCH_KEY: requests}

    before_batch.count = 0
    start = partial(
        evaluate, step, params, stats, source=SOURCE, batch=(8, 8), mesh=mesh, before_batch=before_batch, on_request=read.append
    )
    if last_batch:
        assert start()["eval_examples"] == 53
    else:
        with pytest.raises(StopTraining):
            start()
    assert read == [request_flags.NONE] * (asked - 1) + [request_flags.STOP]
    assert before_batch.count == (7 if last_batch else asked + 2)


@pytest.mark.parametrize(("mesh_shape", "batch"), [((1, 1), (53, 53)), ((1, 3), (20, 21)), ((2, 4), (100, 104))])
def test_counts_equal_sklearn_for_any_batch_and_number_of_devices(trained, mesh_shape, batch):
    model, params, stats = trained
    mesh = make_mesh(*mesh_shape)
    confusion = Confusion(9)
    step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
    ours = evaluate(step, params, stats, source=SOURCE, batch=batch, mesh=mesh, observer=confusion)
    images, labels = SOURCE.batch(np.arange(53))
    apply = jax.jit(lambda images: model.apply(params, stats, normalize(images, *PIXELS), train=False)[0])
    logits = np.asarray(apply(images), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert ours["eval_examples"] == 53
    assert ours["eval_accuracy"] == (logits.argmax(-1) == labels).mean()
    assert ours["eval_top5"] == top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    assert ours["eval_loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(9)), rel=1e-5)
    np.testing.assert_array_equal(confusion.counts, confusion_matrix(labels, logits.argmax(-1), labels=range(9)))

    source = IgnoringSome(53, 12, 9, seed=0, split=1)
    ours = evaluate(step, params, stats, source=source, batch=batch, mesh=mesh)
    kept = np.arange(53) % 5 > 0
    assert ours["eval_examples"] == kept.sum()
    assert ours["eval_accuracy"] == (logits.argmax(-1) == labels)[kept].mean()
    assert ours["eval_top5"] == top_k_accuracy_score(labels[kept], logits[kept], k=5, labels=range(9))
    assert ours["eval_loss"] == pytest.approx(log_loss(labels[kept], probabilities[kept], labels=range(9)), rel=1e-5)


def test_confusion_matrix_with_tied_logits_agrees_with_the_accuracy(trained):
    """A tie counts against the model: with logits that are all the same, nothing is right, nor on the diagonal."""
    model, params, stats = trained
    mesh, confusion = make_mesh(1, 2), Confusion(9)
    step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
    flat = params | {"fc_kernel": 0 * params["fc_kernel"], "fc_bias": 0 * params["fc_bias"]}
    ours = evaluate(step, flat, stats, source=SOURCE, batch=(53, 54), mesh=mesh, observer=confusion)
    assert ours["eval_accuracy"] == confusion.counts.trace() == 0
    np.testing.assert_array_equal(confusion.counts.sum(1), np.bincount(SOURCE.batch(np.arange(53))[1], minlength=9))


EVALUATION_AND_FEED = """
import hashlib
import json
import numpy as np
from jaxdp import models, train
from jaxdp.data import prefetch
from jaxdp.models import resnet
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.evaluation import ExampleCollector, evaluate, make_evaluation_step
from jaxdp.training.state import create_state
resnet.BLOCKS[6] = (1, 1)
from training.test_evaluation import CONFIG, PIXELS, SOURCE

mesh = make_mesh(2, 4)
model = models.create(CONFIG.model)
state = create_state(CONFIG, model, mesh)
step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
print("evaluation", json.dumps(evaluate(step, state.params, state.batch_stats, source=SOURCE, batch=(20, 24), mesh=mesh)))
feeder = prefetch.DeviceIterator(SOURCE, mesh, seed=0, first=0, end=64, global_batch=32, chunk_rows=2)
while (batch := feeder.next()) is not None:
    for place, shard in enumerate(batch["images"].addressable_shards):
        row, positions = shard.index[0].start, batch["positions"].addressable_shards[place].data
        print("rows", row, np.asarray(positions).tolist(), hashlib.sha256(np.asarray(shard.data)).hexdigest())
feeder.close()
"""


@pytest.mark.slow
def test_evaluation_and_batches_are_the_same_on_one_process_and_on_two(over_processes):
    """Each loads rows of its own, together they are the batch, and every example counts once."""
    counted, counts = {}, {}
    for processes in (1, 2):
        printed = over_processes(EVALUATION_AND_FEED, processes)
        rows = [[line for line in lines if line.startswith("rows")] for lines in printed]
        assert [len(lines) for lines in rows] == [2 * 8 // processes] * processes
        (evaluation,) = {line for lines in printed for line in lines if line.startswith("evaluation")}
        counted[processes] = sorted(line for lines in rows for line in lines)
        counts[processes] = json.loads(evaluation.removeprefix("evaluation"))
    assert counted[1] == counted[2]
    losses = [count.pop("eval_loss") for count in counts.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)  # sums over devices in another order
    assert counts[1] == counts[2]
    assert counts[1]["eval_examples"] == 53
    positions = [position for line in counted[1] for position in json.loads(line[line.index("[") : line.index("]") + 1])]
    assert sorted(positions) == list(range(64))


def test_evaluate_does_not_wait_between_the_sync_point_and_the_step_of_a_batch(trained):
    """A process that stopped while it waited for images left other processes alone in the collective of the step."""
    events = []

    def wait_for(future):
        events.append("wait")
        return future.result()

    def step(*arguments):
        events.append("step")
        return compiled(*arguments)

    model, params, batch_stats = trained
    mesh = make_mesh(1, 2)
    compiled = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
    evaluate(
        step,
        params,
        batch_stats,
        source=SOURCE,
        batch=(8, 8),
        mesh=mesh,
        before_batch=lambda: events.append("sync point") or {},
        wait_for=wait_for,
    )
    assert events == ["wait", "sync point", "step"] * (len(events) // 3)
    assert len(events) >= 6


@pytest.mark.parametrize(("counted", "field", "value"), [(53, "positions", 1), (52, "seen", 0)])
def test_evaluate_with_the_first_example_counted_as_another_or_not_at_all_raises(trained, monkeypatch, counted, field, value):
    """Without the first example, whose position is 0, the sum of the positions is as expected."""
    original, mesh = prefetch.evaluation_batch, make_mesh(1, 2)
    step = make_evaluation_step(CONFIG, trained[0], mesh, pixel_stats=PIXELS)

    def changed(*arguments, **options):
        part = original(*arguments, **options)
        part[field][0] = value
        return part

    monkeypatch.setattr(prefetch, "evaluation_batch", changed)
    with pytest.raises(TrainingError, match=f"counted {counted} examples, .* or some were counted twice"):
        evaluate(step, *trained[1:], source=SOURCE, batch=(53, 54), mesh=mesh)


@pytest.mark.parametrize("classes", [5, 6])
def test_evaluate_with_five_classes_reports_no_top5(tiny, tmp_path, classes):
    """With six it does, also where each device has fewer than six images of a batch."""
    screen = Recorder()
    result = train_shown(with_parts(tiny, model={"classes": classes}), tmp_path, screen=screen)
    assert (result.top5 is None) == (classes == 5)
    assert any("top-5" in line for line in screen.lines) == (classes == 6)
    assert any("eval_top5" in record for record in read_log(tmp_path / "metrics.jsonl")) == (classes == 6)


@pytest.mark.parametrize("total", [0, 1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("limit", [1, 2, 5, 16])
def test_examples_are_spread_evenly_and_collected_with_their_predictions_in_order(total, limit):
    """Batches may come in any order; padding and images that cannot be read are left out."""
    collector = ExampleCollector(total, limit)
    count = min(limit, total)
    expected = {round(index * (total - 1) / max(1, count - 1)) for index in range(count)}
    assert collector.selected.tolist() == sorted(expected)
    unread = {7, total - 1} if total > 2 else set()
    rows = np.random.default_rng(0).permutation(total)
    for start in range(0, total, 6):
        positions = np.append(rows[start : start + 6], 0)  # the last row is padding
        weights = np.array([position not in unread for position in positions[:-1]] + [False], np.int32)
        images = np.broadcast_to((positions % 256).astype(np.uint8)[:, None, None, None], (len(positions), 2, 2, 3)).copy()
        add = collector({"positions": positions, "weights": weights, "labels": positions + 1, "images": images})
        assert (add is None) == (not expected & {*positions[weights > 0].tolist()})
        images[:] = 99  # the buffer is used again
        if add:
            add(positions + 2)
    found = sorted(expected - unread)
    if not found:
        assert collector.arrays() == []
    else:
        images, labels, predicted = collector.arrays()
        np.testing.assert_array_equal(images, np.array(found, np.uint8)[:, None, None, None] + np.zeros((2, 2, 3), np.uint8))
        assert (labels.tolist(), predicted.tolist()) == ([p + 1 for p in found], [p + 2 for p in found])
