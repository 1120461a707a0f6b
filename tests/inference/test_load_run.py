"""Tests of jaxdp.inference.load_run, evaluate and export on a trained run."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.checkpoints import rewrite_manifest
from helpers.runs import read_records
from safetensors import safe_open

import jaxdp
from jaxdp.cli import main
from jaxdp.config import Checkpoint
from jaxdp.errors import ConfigError
from jaxdp.inference.checkpoints import choose_checkpoint, delete_all_but, list_checkpoints
from jaxdp.inference.export import export
from jaxdp.inference.load_run import load_run
from jaxdp.setup.run_dir import lock_run_dir


def with_other_checksum(arrays):
    """The descriptions of arrays with a wrong checksum for the first one."""
    name, (dtype, shape, checksum) = next(iter(arrays.items()))
    return arrays | {name: [dtype, shape, checksum[::-1]]}


def test_checkpoints_of_a_trained_run_can_be_listed_evaluated_and_exported(tiny, tmp_path, capsys):
    config = dataclasses.replace(
        tiny, checkpoint=Checkpoint(keep=9), optimizer=dataclasses.replace(tiny.optimizer, average_decay=0.5)
    )
    result = jaxdp.train(config, tmp_path)
    rows = list_checkpoints(tmp_path)
    assert [(row["samples"], row["steps"], row["error"]) for row in rows] == [
        (56, 7, None),
        (80, 10, None),
        (112, 12, None),
        (160, 15, None),
    ]
    newest = jaxdp.evaluate(None, tmp_path)
    assert (newest["eval_accuracy"], newest["samples"], newest["eval_examples"]) == (result.accuracy, 160, 23)
    assert newest["eval_loss"] == pytest.approx(result.loss, rel=1e-6)
    at_56 = jaxdp.evaluate(config, tmp_path, "56")
    logged = read_records(tmp_path)
    assert at_56["eval_accuracy"] == next(line["eval_accuracy"] for line in logged if "eval_accuracy" in line)
    best = choose_checkpoint(tmp_path, "best")
    assert best.evaluation["eval_accuracy"] == max(row["accuracy"] for row in rows if row["accuracy"] is not None)

    names = {row["samples"]: row["names"] for row in rows}
    assert [samples for samples in names if "best" in names[samples]] == [best.samples]
    assert {"result", "newest"} <= set(names[160])
    assert not set(names[56]) & {"result", "newest"}

    exported = export(tmp_path, tmp_path / "w.safetensors", "56")
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        names = list(file.keys())
        assert len(names) == exported["tensors"]
        assert file.metadata()["samples"] == "56"
        weights = {name: file.get_tensor(name) for name in names}
    params, _ = load_run(tmp_path, "56").state.eval_variables
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_array_equal(weights["/".join(["params", *(key.key for key in path)])], leaf)

    file = tmp_path / "checkpoints/80/manifest.json"
    file.write_bytes(file.read_bytes()[:-3])
    rewrite_manifest(tmp_path / "checkpoints/112", lambda content: content | {"arrays": with_other_checksum(content["arrays"])})
    errors = [row["error"] for row in list_checkpoints(tmp_path)]
    assert [error is None for error in errors] == [True, False, False, True]
    assert "the checksum of the array .params" in errors[2]

    with pytest.raises(SystemExit) as ended:
        main.main(["checkpoints", "--workdir", str(tmp_path)])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "manifest.json is corrupt" in shown
    assert shown.count("valid") == 2

    with lock_run_dir(tmp_path), pytest.raises(ConfigError, match="another process is training"):
        delete_all_but(tmp_path, ["newest"])
    with pytest.raises(ConfigError, match="--keep='57': checkpoint not found"):
        delete_all_but(tmp_path, ["newest", "57"])
    assert len(list_checkpoints(tmp_path)) == 4
    main.main(["checkpoints", "--workdir", str(tmp_path), "--keep", "best, last,56"])
    kept = sorted({56, best.samples, 160})
    assert [(row["samples"], row["error"]) for row in list_checkpoints(tmp_path)] == [(samples, None) for samples in kept]
    assert jaxdp.train(config, tmp_path) == result  # finished, and not confused by what is missing
