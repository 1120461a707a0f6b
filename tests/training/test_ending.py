"""What a run says and returns at its end."""

import math
from types import SimpleNamespace

import pytest

from jaxdp.checkpoint.progress import Progress
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.errors import TrainingError
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


@pytest.mark.parametrize(
    ("steps", "skipped", "scaling", "said"),
    [
        (0, 0, "none", None),
        (3, 2, "none", None),
        (3, 3, "none", "all 3 steps were skipped because no gradient was finite: lower schedule.learning_rate"),
        (3, 3, "dynamic", "all 3 .* finite at loss scales of 1 to 32768: use --model.dtype bfloat16"),
        (1, 1, 64.0, "all 1 .* finite at a loss scale of 64: use --model.dtype bfloat16"),
    ],
)
def test_run_that_skipped_all_of_its_steps_raises(steps, skipped, scaling, said):
    optimizer = SimpleNamespace(loss_scale=scaling)
    run = SimpleNamespace(progress=Progress(steps=steps, skipped_steps=skipped), config=SimpleNamespace(optimizer=optimizer))
    if said is None:
        ending.check_skipped(run)
    else:
        with pytest.raises(TrainingError, match=f"^{said}"):
            ending.check_skipped(run)


@pytest.mark.parametrize("loss", [0.0, 1e30, math.inf, -math.inf, math.nan])
def test_loss_that_is_not_finite_raises(loss):
    record = {"eval_loss": loss, "step": 7, "samples": 56}
    if loss in {0.0, 1e30}:
        ending.check_evaluation(record)
    else:
        with pytest.raises(TrainingError, match=rf"held-out loss is {loss} after the last step \(7, samples 56\).*; lower"):
            ending.check_evaluation(record)


@pytest.fixture
def stopped_run(monkeypatch, tmp_path):
    """A run that was stopped after step 10 of 50 images an epoch, as (rank, accuracy of its checkpoint) -> run."""

    def make(rank, accuracy):
        newest = SimpleNamespace(path=f"{rank}/80", samples=80, evaluation={"eval_accuracy": accuracy})
        manifests = [] if accuracy == "no checkpoint" else [newest, SimpleNamespace(path="older")]
        waits: list[int] = []

        def read_manifests(folder):
            assert (rank, folder, waits) == (1, tmp_path, [1])  # rank 0 verifies checksums; after the save in progress
            return iter(manifests)

        def latest_valid():
            assert (rank, waits) == (0, [1])
            return manifests[0] if manifests else None

        monkeypatch.setattr(ending, "read_manifests", read_manifests)
        return SimpleNamespace(
            checkpoints=SimpleNamespace(
                folder=tmp_path, wait=lambda: waits.append(1), latest_valid=latest_valid, last_error=None
            ),
            is_rank0=rank == 0,
            plan=SimpleNamespace(examples=50),
            epoch=1.6,
            progress=Progress(steps=10),
            resume_action="the same command",
            signals=SimpleNamespace(stop_reason="SIGTERM"),
        )

    return make


@pytest.mark.parametrize(
    ("rank", "accuracy", "said"),
    [
        (0, 0.5, "the last valid checkpoint is 0/80 (epoch 1.60, accuracy 50.00 %); the same command continues from it"),
        (1, None, "the last checkpoint is 1/80 (epoch 1.60); the same command continues from it"),
        (0, "no checkpoint", "there is no checkpoint yet"),
        (1, "no checkpoint", "there is no checkpoint yet"),
    ],
    ids=["rank 0", "rank 1", "rank 0, none", "rank 1, none"],
)
def test_stopped_run_names_its_newest_checkpoint_and_how_to_resume(stopped_run, rank, accuracy, said):
    after = "stopped by SIGTERM after step 10 (epoch 1.60)"
    stopped = ending.stop_exception(stopped_run(rank, accuracy), saved=True)
    assert (type(stopped), str(stopped)) == (Stopped, f"{after}; {said}")
    run = stopped_run(rank, accuracy)
    run.checkpoints.last_error = "disk full"
    failed = ending.stop_exception(run, saved=True)
    assert (type(failed), str(failed)) == (TrainingError, f"{after}, which could not be saved (disk full); {said}")
    before = ending.stop_exception(stopped_run(rank, accuracy), saved=False)
    resume = "starts over" if accuracy == "no checkpoint" else f"continues from {rank}/80"
    assert type(before) is Stopped
    assert str(before) == f"stopped by SIGTERM before the first step of this session; the same command {resume}"
