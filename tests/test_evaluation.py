import jax
import numpy as np
import pytest
from sklearn.metrics import log_loss, top_k_accuracy_score

from jaxdp import models
from jaxdp.config import Config, Data, Model
from jaxdp.data import feed
from jaxdp.data.augment import normalise
from jaxdp.data.sources import SyntheticSource
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.evaluation import evaluate, make_evaluation_step
from jaxdp.training.guard import TrainingError

CONFIG = Config(data=Data(source="synthetic", image_size=12), model=Model(depth=6, width=4, stem="small", classes=9))
SOURCE = SyntheticSource(53, 12, 9, seed=0, split=1)
PIXELS = (127.5, 50.0)


@pytest.fixture(scope="module")
def trained():
    model = models.create(CONFIG.model)
    params, stats = jax.jit(lambda: model.init(jax.random.key(0), (12, 12, 3)))()
    return model, jax.tree.map(lambda p: p + 0.1, params), stats


@pytest.mark.parametrize(
    ("mesh_shape", "batch"), [((1, 1), (53, 53)), ((2, 4), (16, 16)), ((1, 3), (20, 21)), ((8, 1), (100, 104))]
)
def test_counts_equal_sklearn_for_any_batch_and_number_of_devices(trained, mesh_shape, batch):
    model, params, stats = trained
    mesh = make_mesh(*mesh_shape)
    ours = evaluate(make_evaluation_step(CONFIG, model, PIXELS, mesh), params, stats, SOURCE, batch, mesh)
    images, labels = SOURCE.batch(np.arange(53))
    logits = np.asarray(model.apply(params, stats, normalise(images, *PIXELS), train=False)[0], np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert ours["eval_examples"] == 53
    assert ours["eval_accuracy"] == (logits.argmax(-1) == labels).mean()
    assert ours["eval_top5"] == top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    assert ours["eval_loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(9)), rel=1e-5)


def test_an_evaluation_that_did_not_count_every_example_once_fails(trained):
    model, params, stats = trained

    class Forgetful(SyntheticSource):
        """Says after the first batch that it is longer than it was."""

        def batch(self, indices, positions=None):
            self.examples = 53
            return super().batch(indices, positions)

    mesh = make_mesh(1, 2)
    source = Forgetful(40, 12, 9, seed=0, split=1)
    with pytest.raises(TrainingError, match="counted 40 examples and the source has 53"):
        evaluate(make_evaluation_step(CONFIG, model, PIXELS, mesh), params, stats, source, (20, 20), mesh)


def test_an_example_counted_twice_in_place_of_another_fails(trained, monkeypatch):
    model, params, stats = trained
    original = feed.evaluation_batches

    def twice(source, batch, rows):
        for part in original(source, batch, rows):
            part["positions"][0] = part["positions"][1]
            yield part

    monkeypatch.setattr(feed, "evaluation_batches", twice)
    mesh = make_mesh(1, 2)
    with pytest.raises(TrainingError, match="counted 53 examples and the source has 53, or some were counted twice"):
        evaluate(make_evaluation_step(CONFIG, model, PIXELS, mesh), params, stats, SOURCE, (53, 54), mesh)
