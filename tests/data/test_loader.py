"""`jaxdp.data.Loader`: order, placement on the mesh, and exact resume from its state."""

import json

import jax
import numpy as np
import pytest
from helpers.processes import ROOT, TIMEOUT, launch, wait_for_exit
from jax.sharding import PartitionSpec

import jaxdp

random = np.random.default_rng(0)
IMAGES, LABELS = random.integers(0, 256, (30, 6, 6, 3)).astype(np.uint8), np.arange(30)


def labels_of(loader, batches):
    return [np.asarray(next(loader)["labels"]).tolist() for _ in range(batches)]


def test_every_epoch_holds_every_example_once():
    with jaxdp.data.Loader((IMAGES, LABELS), 8, seed=3, end=60) as loader:
        seen = np.concatenate([batch["labels"] for batch in loader])
    assert len(seen) == 64
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))
    assert seen[:30].tolist() != seen[30:60].tolist() != list(range(30))


def test_rows_are_sharded_over_the_mesh_with_their_labels():
    with jaxdp.data.Loader((IMAGES, LABELS), 16, mesh=jaxdp.make_mesh(2, 2)) as loader:
        batch = next(loader)
    assert batch["images"].sharding.spec == PartitionSpec(("vertical", "horizontal"))
    np.testing.assert_array_equal(batch["images"], IMAGES[np.asarray(batch["labels"])])


def test_a_loader_continues_from_its_state_with_another_batch_and_mesh():
    with jaxdp.data.Loader((IMAGES, LABELS), 8, seed=5) as loader:
        labels_of(loader, 3)
        state = json.loads(json.dumps(loader.get_state()))
        expected = np.concatenate(labels_of(loader, 4))
        loader.set_state(state)
        np.testing.assert_array_equal(np.concatenate(labels_of(loader, 4)), expected)
    with jaxdp.data.Loader((IMAGES, LABELS), 16, seed=5, mesh=jaxdp.make_mesh(1, 2)) as other:
        other.set_state({name: np.asarray(value) for name, value in state.items()})  # as Orbax may restore them
        np.testing.assert_array_equal(np.concatenate(labels_of(other, 2)), expected)


def test_a_loader_starts_and_ends_at_the_given_samples():
    run = {"batch": 1, "mesh": jaxdp.make_mesh(1, 1), "seed": 2}
    with jaxdp.data.Loader((IMAGES, LABELS), **run, end=5) as loader:
        whole = [np.asarray(batch["labels"]).item() for batch in loader]
    with jaxdp.data.Loader((IMAGES, LABELS), **run, start=3, end=5) as loader:
        assert [np.asarray(batch["labels"]).item() for batch in loader] == whole[3:]
        assert loader.get_state() == {"samples": 5, "seed": 2, "examples": 30}
    with jaxdp.data.Loader((IMAGES, LABELS), **run, end=0) as loader:
        assert len(whole) == 5 > len(list(loader)) == 0


class FailsOnce:
    """Images whose labels are their indices; reading one of them fails the first time."""

    def __init__(self, index):
        self.index = index

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        if index == self.index:
            self.index = None
            raise OSError("no answer")
        return IMAGES[index], index


def test_a_loader_reads_the_same_batch_again_after_an_error():
    with jaxdp.data.Loader((IMAGES, LABELS), 8, seed=1, end=64) as loader:
        expected = labels_of(loader, 8)
    with jaxdp.data.Loader(FailsOnce(expected[1][3]), 8, seed=1, end=64, image_size=6) as loader:
        assert labels_of(loader, 1) == expected[:1]
        failed = loader.batches
        with pytest.raises(RuntimeError, match="no answer"):
            next(loader)
        with pytest.raises(Exception, match=r"shutdown|^$"):  # what was read ahead is not kept
            failed.next()
        assert loader.get_state()["samples"] == 8
        assert labels_of(loader, 7) == expected[1:]
        with pytest.raises(StopIteration):
            next(loader)


def test_items_and_gray_arrays_become_images_of_one_size():
    items = [(IMAGES[0], 1), (np.zeros((9, 12), np.uint8), 0)] * 4
    with jaxdp.data.Loader(items, 8, image_size=4) as loader:
        assert next(loader)["images"].shape == (8, 4, 4, 3)
    with jaxdp.data.Loader((IMAGES, LABELS), 8, image_size=3) as loader:
        assert next(loader)["images"].shape == (8, 3, 3, 3)
    with jaxdp.data.Loader((IMAGES[..., 0], LABELS), 8) as loader:
        batch = next(loader)
    np.testing.assert_array_equal(batch["images"][..., 2], IMAGES[np.asarray(batch["labels"]), :, :, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 9), f"batch=9: cannot be divided among {jax.device_count()} devices"),
        (lambda: jaxdp.data.Loader((IMAGES[:0], LABELS[:0]), 8), "dataset: it has no images"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 0), "batch=0: must be a whole number, at least 1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, end=-1), "end=-1: must be a whole number, at least 0"),
        (
            lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state({"seed": 0, "examples": 31, "samples": 0}),
            "has examples=31",
        ),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), -8), "batch=-8: must be a whole number, at least 1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, image_size=0), "image_size=0: must be a whole number, at least 1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state({"seed": 1, "examples": 30, "samples": 0}), "has seed=1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state({"samples": 8}), "instance of dict without samples"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state(8), "state: an instance of int is no state of a loader"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS - 1), 8), "row 0 of training has the label -1; labels are whole numbers"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS + 2**40), 8), r"row 0 of training has the label \d+; labels are"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, seed=2**63), r"seed=\d+: must be a whole number"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, seed=-1), "seed=-1: must be a whole number, at least 0"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, start=-1), "start=-1: must be a whole number, at least 0"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, mesh=jax.make_mesh((8,), ("x",))), "mesh=.*must have the axes"),
        (
            lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state({"seed": 0, "examples": 30, "samples": -1}),
            "samples=-1: must be a whole number, at least 0",
        ),
    ],
)
def test_invalid_arguments_are_errors(make, message):
    with pytest.raises(jaxdp.ConfigError, match=message):
        make()


def test_a_closed_loader_stays_closed_and_a_new_state_stops_what_was_read_for_the_old_one():
    with jaxdp.data.Loader((IMAGES, LABELS), 8, seed=2**63 - 1) as loader:
        first, before = labels_of(loader, 1), loader.batches
        loader.set_state(loader.get_state() | {"samples": 0})
        with pytest.raises(Exception, match=r"shutdown|^$"):  # of the pool, or of a cancelled future
            before.next()
        assert labels_of(loader, 1) == first
    for _ in range(2):
        with pytest.raises(Exception, match=r"shutdown|^$"):
            next(loader)


class WithBatch:
    """As data sets of Hugging Face and Grain: items, and a method `batch` that means something else."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return {"image": IMAGES[index], "label": LABELS[index]}

    def batch(self, batch_size):
        raise AssertionError


class IteratorWithBatch:
    """As `tf.data.Dataset`."""

    def batch(self, batch_size):
        raise AssertionError


def test_a_method_batch_of_other_libraries_is_not_called():
    with jaxdp.data.Loader(WithBatch(), 8, image_size=6) as loader:
        batch = next(loader)
    np.testing.assert_array_equal(batch["images"], IMAGES[np.asarray(batch["labels"])])
    with pytest.raises(jaxdp.ConfigError, match="an instance of IteratorWithBatch is no data set"):
        jaxdp.data.Loader(IteratorWithBatch(), 8)


PROGRAM = f"""
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np, jaxdp

jax.config.update("jax_num_cpu_devices", 2)
rank, folder, ends = int(os.environ["JAX_PROCESS_ID"]), Path(sys.argv[1]), sys.argv[2] == "killed"
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, rank)
saved, total = folder / "state.json", jax.jit(lambda labels: labels.sum())
images = np.arange(30, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 4, 4, 3), np.uint8)
with jaxdp.data.Loader((images, np.arange(30)), 8, seed=3, end=80) as loader:
    if saved.exists():
        loader.set_state(json.loads(saved.read_text()))
    for batch in loader:
        rows = {{name: np.concatenate([part.data for part in batch[name].addressable_shards]) for name in batch}}
        assert (rows["images"][:, 0, 0, 0] == rows["labels"]).all()
        with (folder / f"rank{{rank}}.jsonl").open("a") as log:
            print(json.dumps([loader.samples, rows["labels"].tolist()]), file=log)
        if ends and rank == 1 and loader.samples == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        total(batch["labels"]).block_until_ready()
        if rank == 0:
            saved.write_text(json.dumps(loader.get_state()))
"""


@pytest.mark.slow
def test_two_processes_load_the_rows_of_their_devices_also_after_a_kill(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = launch(2, tmp_path, command=[str(program), str(tmp_path), "killed"])
    process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert json.loads((tmp_path / "state.json").read_text()) == {"samples": 32, "seed": 3, "examples": 30}
    wait_for_exit(launch(2, tmp_path, command=[str(program), str(tmp_path), "resumed"]))
    with jaxdp.data.Loader((IMAGES, LABELS), 8, seed=3, mesh=jaxdp.make_mesh(2, 2)) as loader:
        expected = labels_of(loader, 10)
    for rank, rows in enumerate((slice(0, 4), slice(4, 8))):
        lines = map(json.loads, (tmp_path / f"rank{rank}.jsonl").read_text().splitlines())
        assert dict(lines) == {8 * (step + 1): labels[rows] for step, labels in enumerate(expected)}
