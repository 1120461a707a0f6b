"""Tests of jaxdp.trackers.mlflow_client, without a server."""

import importlib.util
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.trackers.mlflow_client import MlflowClient, metric_keys
from jaxdp.trackers.run_files import TrackerState, values

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra mlflow")
ODD = [
    *("a", "a b-c.d: e/f_é", "tench, Tinca tinca", "a,b", "a;b", "a_b", "a_b_2", "", "/", "//", "a/", "a//b", "/a", ".", ".."),
    *("a/./b", "a/../b", "../a", "..a", "a/..", "...", "x" * 251, "x" * 252, f"{'x' * 237}/y", "a\n", "\0", "\ud800", "日本"),
]


def evaluation(names):
    return {"samples": 64, "step": 8, "eval_accuracy": 0.5, **{name: number for number, name in enumerate(names)}}


def test_names_that_mlflow_takes_stay_and_others_are_replaced_without_losing_one():
    assert metric_keys(["evaluation/a,b", "evaluation/a_b", "evaluation/a;b", "evaluation/tench, Tinca tinca"]) == {
        "evaluation/a_b": "evaluation/a_b",
        "evaluation/a,b": "evaluation/a_b_2",
        "evaluation/a;b": "evaluation/a_b_3",
        "evaluation/tench, Tinca tinca": "evaluation/tench_ Tinca tinca",
    }


@needs_mlflow
@pytest.mark.slow  # .ci/run installs the extra only for these
@settings(deadline=None)  # it imports mlflow
@given(st.lists(st.one_of(st.sampled_from(ODD), st.text(), st.text("./a,_2", max_size=6)), unique=True))
def test_mlflow_takes_every_name_that_can_be_logged(logged):
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_metric

    def accepts(name):
        try:
            _validate_metric(name, 1.0, 0, 0)
        except MlflowException:
            return False
        return True

    names = values(evaluation(logged))
    keys = metric_keys(names)
    assert keys.keys() == names.keys()
    assert len({*keys.values()}) == len(names)
    assert all(accepts(key) for key in keys.values())
    assert [name for name in names if accepts(name) and keys[name] != name and not name.endswith("\n")] == []


@needs_mlflow
@pytest.mark.slow  # .ci/run installs the extra only for these
@pytest.mark.parametrize("most", [1, 5, 9, 1000])
def test_a_record_of_more_numbers_than_a_request_takes_is_sent_in_several_its_position_last(tmp_path, monkeypatch, most):
    """Such as the precision of each of a thousand classes."""
    monkeypatch.setattr("jaxdp.trackers.mlflow_client.MOST_METRICS", most)
    requests = []
    client = MlflowClient(tmp_path, TrackerState(tmp_path, "mlflow", "http://fake"), print)
    client.client = SimpleNamespace(log_batch=lambda run, metrics: requests.append([metric.key for metric in metrics]))
    records = [evaluation(["n02, a", "n02; a", *map(str, range(number))]) for number in (0, 2, 12)]
    client.send(records)
    sent = [key for request in requests for key in request]
    assert sorted(sent) == sorted(key for record in records for key in metric_keys(values(record)).values())
    assert max(map(len, requests)) <= most
    assert sent[-1] == "evaluation/samples"
