"""The state before the first step, and what it becomes on another mesh and with given values."""

import jax
import numpy as np
from helpers.step import linear_config

from jaxdp import models
from jaxdp.network import InitialValues
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state, from_host, replicate, replicated, with_values


def by_name(state):
    leaves = jax.tree.leaves_with_path({"params": state.params, "batch_stats": state.batch_stats})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_given_values_replace_those_of_the_same_names_on_every_device(normalized_linear):
    config, mesh = linear_config(), make_mesh(2, 2)
    state = create_state(config, models.create(config.model), mesh)
    before = by_name(state)
    given = {name: np.full(before[name].shape, 5, np.float32) for name in (min(before), max(before))}
    found = with_values(state, InitialValues(given | {"bias": np.ones(7, np.float32)}, "from a test"), mesh)
    assert [name.split("/")[0] for name in given] == ["batch_stats", "params"]
    for name, leaf in by_name(found).items():
        assert (leaf is before[name]) == (name not in given)
        np.testing.assert_array_equal(leaf, given.get(name, before[name]))
    assert found.opt_state is state.opt_state
    assert {leaf.sharding for leaf in jax.tree.leaves(found)} == {replicated(mesh)}


def test_a_tree_moves_to_another_mesh_and_stays_on_its_own():
    first, second = make_mesh(1, 2), make_mesh(2, 2)
    tree = {"x": from_host(np.arange(3.0), first), "y": from_host(np.float32(2), first)}
    assert replicate(tree, first) is tree
    for moved in (replicate(tree, second), replicate(tree | {"x": from_host(np.arange(3.0), second)}, second)):
        assert {leaf.sharding for leaf in jax.tree.leaves(moved)} == {replicated(second)}
        jax.tree.map(np.testing.assert_array_equal, moved, tree)
