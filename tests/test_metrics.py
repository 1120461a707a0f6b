"""Metrics of held-out images: registered ones beside scikit-learn's, in records, commands and the choice of checkpoints."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import Recorder, train_shown
from helpers.step import with_parts
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, f1_score
from training.test_evaluation import CONFIG, PIXELS, SOURCE, IgnoringSome, trained

import jaxdp
from jaxdp import metrics
from jaxdp.checkpoint.listing import by_metric, read_manifests
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.inference.checkpoints import choose_checkpoint, list_checkpoints
from jaxdp.parallel.mesh import make_mesh
from jaxdp.report import summarize
from jaxdp.report.run_history import read
from jaxdp.report.tables import results_table
from jaxdp.run_records import read_log
from jaxdp.training.evaluation import evaluate, make_evaluation_step

trained = trained  # the fixture


def margin(logits, labels):
    """How much the score of the true class exceeds the mean score, float32 [B]."""
    return jnp.take_along_axis(logits, labels[:, None], -1)[:, 0] - logits.mean(-1)


def f1(logits, labels):
    return f1_score(labels, logits.argmax(-1), average="macro", labels=range(logits.shape[-1]), zero_division=0)


@pytest.mark.parametrize(
    ("mesh_shape", "batch"), [((1, 1), (53, 53)), ((1, 2), (10, 10)), ((1, 3), (20, 21)), ((2, 4), (16, 16))]
)
@pytest.mark.parametrize("kind", [type(SOURCE), IgnoringSome])
def test_metrics_of_images_and_of_all_equal_those_of_one_array(trained, mesh_shape, batch, kind):
    """Every image counts once, with a number of images that neither batches nor devices divide."""
    model, params, stats = trained
    jaxdp.register_metric("margin", margin, higher_is_better=False)
    jaxdp.register_metric("f1", f1, of="all")
    mesh, source = make_mesh(*mesh_shape), kind(53, 12, 9, seed=0, split=1)
    step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
    found = evaluate(step, params, stats, source=source, batch=batch, mesh=mesh)
    images, labels = source.batch(np.arange(53))
    logits = np.asarray(models_logits(model, params, stats, images), np.float64)[labels >= 0]
    labels = labels[labels >= 0]
    own = logits[np.arange(len(labels)), labels]
    assert [*found] == ["eval_accuracy", "eval_top5", "eval_margin", "eval_f1", "eval_loss", "eval_examples"]
    assert found["eval_examples"] == len(labels)
    assert found["eval_margin"] == pytest.approx((own - logits.mean(-1)).mean(), rel=1e-5)
    assert found["eval_f1"] == f1_score(labels, logits.argmax(-1), average="macro", labels=range(9), zero_division=0)


def models_logits(model, params, stats, images):
    from jaxdp.data.augment import normalize

    return model.apply(params, stats, normalize(images, *PIXELS), train=False)[0]


def test_registered_metric_is_in_records_result_and_commands_and_chooses_the_best_checkpoint(tiny, tmp_path, own_programs):
    jaxdp.register_metric("brier", lambda logits, labels: brier(logits, labels), higher_is_better=False, of="all")
    jaxdp.register_metric(
        "balanced_accuracy", lambda logits, labels: balanced_accuracy_score(labels, logits.argmax(-1)), of="all"
    )
    config = with_parts(tiny, stop={"metric": "eval_brier", "patience": 9}, checkpoint={"every_epochs": 1, "keep": 9})
    screen = Recorder()
    result = train_shown(config, tmp_path, screen=screen)
    records = [record for record in read_log(tmp_path / "metrics.jsonl") if metrics.is_evaluation(record)]
    scores = [record["eval_brier"] for record in records]
    assert len({*scores}) == len(scores) == 3
    best = min(records, key=lambda record: record["eval_brier"])
    assert (result.best_samples, result.metrics["brier"]) == (best["samples"], best["eval_brier"])
    assert result.metrics.items() <= json.loads((tmp_path / "result.json").read_text()).items()
    assert choose_checkpoint(tmp_path, "best").samples == best["samples"]
    assert next(row for row in list_checkpoints(tmp_path) if "best" in row["names"])["brier"] == best["eval_brier"]
    again = jaxdp.evaluate(None, tmp_path)
    for name in ("eval_brier", "eval_balanced_accuracy"):  # of batches of another size
        assert again[name] == pytest.approx(best[name], rel=1e-6)
    history = read(tmp_path)
    assert summarize(config, history.records)["best_epoch"] == best["epoch"]
    table = results_table([history])
    assert f'<td data-label="brier">{best["eval_brier"]:.4f}</td>' in table
    assert f"balanced accuracy {records[-1]['eval_balanced_accuracy']:.4f}" in metrics.words(records[-1])


def brier(logits, labels):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return brier_score_loss(labels == 0, shares[:, 0])


def test_unknown_or_wrong_metric_is_named_in_one_line(trained, tiny, tmp_path):
    config = with_parts(tiny, stop={"metric": "eval_acuracy"})
    with pytest.raises(
        ConfigError, match=r"^stop\.metric='eval_acuracy': unknown metric; .*eval_accuracy.*register_metric\('acuracy'"
    ):
        jaxdp.train(config, tmp_path)
    with pytest.raises(ConfigError, match=r"^stop\.metric='accuracy': unknown metric; did you mean eval_accuracy\?"):
        metrics.check("accuracy")
    for name, options, reason in (
        ("accuracy", {}, "reserved"),
        ("examples", {}, "reserved"),
        ("Mine", {}, "must consist of lower-case"),
        ("mine", {"of": "batches"}, 'must be "images" or "all"'),
    ):
        with pytest.raises(ConfigError, match=reason):
            jaxdp.register_metric(name, f1, **options)
    model, params, stats = trained
    mesh = make_mesh(1, 1)

    def run(function, of):
        jaxdp.register_metric("mine", function, of=of)
        step = make_evaluation_step(CONFIG, model, mesh, pixel_stats=PIXELS)
        return evaluate(step, params, stats, source=SOURCE, batch=(53, 53), mesh=mesh)

    with pytest.raises(
        ConfigError, match=r"^register_metric='mine': returned an array of shape \(53, 9\) for 53 images; return"
    ):
        run(lambda logits, labels: logits, "images")
    with pytest.raises(
        TrainingError, match=r"^eval_mine cannot be computed: ZeroDivisionError at test_metrics.py:\d+: division by zero"
    ):
        run(lambda logits, labels: 1 / 0, "all")


def test_metric_of_another_process_is_unknown_to_commands_of_this_one(tiny, tmp_path, own_programs):
    jaxdp.register_metric("mine", lambda logits, labels: labels == 0)
    train_shown(with_parts(tiny, stop={"metric": "eval_mine"}), tmp_path, screen=Recorder())
    metrics.METRICS.entries.pop("eval_mine")
    with pytest.raises(ConfigError, match=r"^stop\.metric='eval_mine': unknown metric"):
        list_checkpoints(tmp_path)
    assert by_metric(list(read_manifests(tmp_path / "checkpoints")), "eval_accuracy")
    assert summarize(read(tmp_path).config, read(tmp_path).records)["best_epoch"] is None
