"""`jaxdp.data.Loader`: order, placement on the mesh, and exact resume from its state."""

import json

import jax
import numpy as np
import pytest
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
        other.set_state(state)
        np.testing.assert_array_equal(np.concatenate(labels_of(other, 2)), expected)


def test_items_and_gray_arrays_become_images_of_one_size():
    items = [(IMAGES[0], 1), (np.zeros((9, 12), np.uint8), 0)] * 4
    with jaxdp.data.Loader(items, 8, image_size=4) as loader:
        assert next(loader)["images"].shape == (8, 4, 4, 3)
    with jaxdp.data.Loader((IMAGES[..., 0], LABELS), 8) as loader:
        batch = next(loader)
    np.testing.assert_array_equal(batch["images"][..., 2], IMAGES[np.asarray(batch["labels"]), :, :, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 9), f"batch=9: cannot be divided among {jax.device_count()} devices"),
        (lambda: jaxdp.data.Loader((IMAGES[:0], LABELS[:0]), 8), "dataset: it has no images"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), -8), "batch=-8: must be a whole number, at least 1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8, image_size=0), "image_size=0: must be a whole number, at least 1"),
        (lambda: jaxdp.data.Loader((IMAGES, LABELS), 8).set_state({"seed": 1, "examples": 30, "samples": 0}), "has seed=1"),
    ],
)
def test_invalid_arguments_are_errors(make, message):
    with pytest.raises(jaxdp.ConfigError, match=message):
        make()


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
