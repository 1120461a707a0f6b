"""Tests of jaxdp.loggers.mlflow_logger, without a server."""

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp.loggers import mlflow_logger
from jaxdp.loggers.mlflow_logger import MlflowLogger, metric_key
from jaxdp.loggers.tracker import Record

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra mlflow")
ODD = [
    *("a", "a b-c.d: e/f_é", "tench, Tinca tinca", "a,b", "a;b", "a_b", "a_b_2", "", "/", "//", "a/", "a//b", "/a", ".", ".."),
    *("a/./b", "a/../b", "../a", "..a", "a/..", "...", "x" * 251, "x" * 252, f"{'x' * 237}/y", "a\n", "\0", "\ud800", "日本"),
]


def evaluation(names):
    return Record({"samples": 64, "step": 8, "eval_accuracy": 0.5, **{name: number for number, name in enumerate(names)}})


@needs_mlflow
@pytest.mark.slow  # .ci/run installs the extra only for these
@given(st.one_of(st.sampled_from(ODD), st.text(), st.text("./a,_2", max_size=6)))
def test_mlflow_takes_every_name_that_can_be_logged(logged):
    from mlflow import MlflowException
    from mlflow.utils.validation import _validate_metric

    def accepts(name):
        try:
            _validate_metric(name, 1.0, 0, 0)
        except MlflowException:
            return False
        return True

    (name,) = evaluation([logged]).numbers.keys() - evaluation([]).numbers.keys() or {"evaluation/step"}
    assert accepts(metric_key(name))
    assert metric_key(name) == name or not accepts(name) or name.endswith("\n")


@needs_mlflow
@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 5, 9, 1000])
def test_records_of_more_numbers_than_a_request_takes_are_sent_in_several_their_position_last(monkeypatch, most):
    """Such as the precision of each of a thousand classes."""
    monkeypatch.setattr(mlflow_logger, "MOST_METRICS", most)
    requests = []
    logger = MlflowLogger("http://fake")
    logger.run_id, logger.start_ms = "run", 0
    logger.client = SimpleNamespace(log_batch=lambda run, metrics: requests.append([metric.key for metric in metrics]))
    records = [evaluation(["n02, a", "n02; b", *map(str, range(number))]) for number in (0, 2, 12)]
    logger.send(records)
    sent = [key for request in requests for key in request]
    assert sorted(sent) == sorted(metric_key(name) for record in records for name in record.numbers)
    assert max(map(len, requests)) <= most
    assert sent[-1] == "evaluation/samples"


@needs_mlflow
@pytest.mark.slow
@pytest.mark.parametrize(("code", "ends"), [("INVALID_PARAMETER_VALUE", False), ("INTERNAL_ERROR", True)])
def test_numbers_that_the_server_refuses_are_left_out_and_all_others_wait_for_it(monkeypatch, code, ends):
    from mlflow import MlflowException
    from mlflow.exceptions import RestException

    requests, shown = [], []

    def log_batch(run, metrics):
        requests.append(len(metrics))
        raise RestException({"error_code": code, "message": "no"})

    monkeypatch.setattr(mlflow_logger, "MOST_METRICS", 2)
    logger = MlflowLogger("http://fake")
    logger.run_id, logger.start_ms, logger.client = "run", 0, SimpleNamespace(log_batch=log_batch)
    monkeypatch.setattr(logger, "_show", shown.append)
    with pytest.raises(MlflowException) if ends else contextlib.nullcontext():
        logger.send([evaluation("ab")])
    assert requests == ([2] if ends else [2, 2, 1])
    assert len(shown) == (not ends)
