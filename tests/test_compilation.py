"""Compiled programs are kept for the next run, where a user can see them."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.bench.stepper import stepper
from jaxdp.config import Compile, ConfigError
from jaxdp.parallel import compilation
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training import seal
from jaxdp.training.session import train

COUNTED = """
import json, sys
from collections import Counter
import jax
import jaxdp
from jaxdp.cli import main
from jaxdp.models import resnet
resnet.BLOCKS[18] = (1, 1)
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
config = jaxdp.load_config(sys.argv[1], sys.argv[3:])
jaxdp.train(config, sys.argv[2])
told = {name: events["/jax/compilation_cache/" + name] for name in ("cache_hits", "cache_misses")}
print(json.dumps(told | {"directory": jax.config.jax_compilation_cache_dir}))
"""


@pytest.fixture
def jax_cache(monkeypatch):
    """JAX as if nobody had told it where to keep programs; put back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_by_kind_of_processor_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compilation.cache_directory("auto")
    assert found.parent == tmp_path / "jaxdp/programs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compilation.cache_directory("auto") == tmp_path / "home/.cache/jaxdp/programs" / found.name
    assert compilation.cache_directory("~/kept") == tmp_path / "home/kept"
    assert compilation.cache_directory("off") is None


def test_a_directory_that_cannot_be_made_is_an_error_where_it_was_asked_for(jax_cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile.cache: '.*file/programs' is not allowed; it cannot be made \(.*\); give"):
        compilation.keep_programs(Compile(cache=str(tmp_path / "file/programs")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation.keep_programs(Compile())
    assert jax.config.jax_compilation_cache_dir is None


def test_what_jax_was_told_before_is_left_as_it_is_unless_another_place_is_asked_for(jax_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    compilation.keep_programs(Compile())
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "told")
    compilation.keep_programs(Compile(cache=str(tmp_path / "asked")))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "asked")
    compilation.keep_programs(Compile(cache="off"))
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_a_second_run_compiles_nothing_with_another_seed_either(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(tiny)))
    there = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    there |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}

    def counted(name, *more):
        line = [sys.executable, "-c", COUNTED, str(tmp_path / "config.json"), str(tmp_path / name), *more]
        ran = subprocess.run(line, env=there, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    first, second, off = counted("first"), counted("second", "--seed", "1"), counted("off", "--compile.cache", "off")
    assert first["cache_misses"] >= 4  # two training steps, two evaluations
    assert first["directory"].startswith(str(tmp_path / "cache/jaxdp/programs"))
    assert (second["cache_misses"], second["cache_hits"]) == (0, first["cache_misses"] + first["cache_hits"])
    assert (off["cache_hits"], off["directory"]) == (0, None)
    one, two, three = (seal.newest_good(tmp_path / name / "checkpoints").arrays for name in ("first", "second", "off"))
    assert one == three != two  # of another seed


def test_tuned_programs_compute_what_untuned_ones_do(tiny):
    found = {}
    for tuned in (True, False):
        config = dataclasses.replace(tiny, compile=Compile(tuned=tuned))
        assert bool(compilation.options(config.compile, "cpu")) == tuned
        one = stepper(config, make_mesh(2, 2), 8, "torus")
        one.hyperparameters["learning_rate"] = np.float32(1.0)
        found[tuned] = jax.device_get(one())
    (params, metrics), (others, other_metrics) = found[True], found[False]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), params, others)
    assert metrics["gradient_norm"] == pytest.approx(other_metrics["gradient_norm"], rel=1e-5)


def test_programs_go_where_the_last_run_asked(jax_cache, tmp_path):
    def kept(asked: str, value: float) -> list[int]:
        """How many files there are in both places after a new program."""
        compilation.keep_programs(Compile(cache=asked))
        jax.jit(lambda x: jnp.sin(x) * value)(np.float32(1.0))
        return [len([*(tmp_path / name).glob("*")]) for name in ("one", "two")]

    first, _ = kept(str(tmp_path / "one"), 1.0)
    unchanged, second = kept(str(tmp_path / "two"), 2.0)
    assert 0 < first == unchanged
    assert second > 0
    assert kept("off", 3.0) == [first, second]


@pytest.mark.slow
def test_a_deterministic_run_asks_xla_for_it_and_changes_nothing_on_a_cpu(tiny, tmp_path):
    assert compilation.options(Compile(deterministic=True, tuned=False), "gpu") == {"xla_gpu_deterministic_ops": True}
    assert "xla_gpu_deterministic_ops" not in compilation.options(Compile(), "gpu")
    plain = train(tiny, tmp_path / "plain")
    strict = train(dataclasses.replace(tiny, compile=Compile(deterministic=True)), tmp_path / "strict")
    assert np.array_equal([plain.loss, plain.accuracy], [strict.loss, strict.accuracy])
