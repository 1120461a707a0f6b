"""What a run says and returns at its end."""

from types import SimpleNamespace

import pytest

from jaxdp.checkpoint.progress import Progress
from jaxdp.training import ending

LAST = {"samples": 30, "eval_accuracy": 0.7}
BEST = {"samples": 20, "eval_accuracy": 0.9}


@pytest.mark.parametrize(
    ("best", "saved", "result"),
    [(None, [10, 20, 30], LAST), (None, [], LAST), (BEST, [30, 20], BEST), (BEST, [30], LAST), (BEST, [], LAST)],
    ids=["without early stopping", "nothing saved", "best", "best not saved", "best, nothing saved"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_result_is_the_best_evaluation_whose_checkpoint_exists(monkeypatch, tmp_path, best, saved, result, rank):
    """Rank 0 reads the directory; every process returns what it found."""
    manifests, said = [SimpleNamespace(samples=samples) for samples in saved], []
    monkeypatch.setattr(ending, "read_manifests", lambda folder: iter(manifests if rank == 0 else []))
    found_by_rank_0 = best is not None and best["samples"] in saved
    run = SimpleNamespace(
        progress=Progress(best=best, last_evaluation=LAST),
        checkpoints=SimpleNamespace(folder=tmp_path),
        is_rank0=rank == 0,
        processes=SimpleNamespace(broadcast_object=lambda name, value: value if rank == 0 else found_by_rank_0),
        info=said.append,
    )
    assert ending.result_evaluation(run) == result
    missing = f"the best checkpoint, {tmp_path / '20'}, does not exist; the result is the last one"
    assert said == ([missing] if best is not None and result is LAST else [])
