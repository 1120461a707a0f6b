"""Compiler options, and the cache of compiled programs."""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.bench.step_runner import build_step
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.config import Compile, Config, Model
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import make_mesh
from jaxdp.xla import options

COUNT_COMPILATIONS = """
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
counts = {name: events["/jax/compilation_cache/" + name] for name in ("cache_hits", "cache_misses")}
print(json.dumps(counts | {"directory": jax.config.jax_compilation_cache_dir}))
"""


@pytest.fixture
def jax_cache(monkeypatch):
    """JAX without a cache directory; the previous settings are restored."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_cache_directory_depends_on_processor_type(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = options.cache_directory()
    assert path.parent == tmp_path / "jaxdp/programs"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert options.cache_directory() == tmp_path / "home/caches/jaxdp/programs" / path.name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert options.cache_directory() == tmp_path / "home/.cache/jaxdp/programs" / path.name


CPUINFO = """processor\t: {number}
model name\t: {model}
cpu MHz\t\t: {number}000.5
flags\t\t: {flags}

"""


def test_processors_of_one_model_and_its_instructions_share_programs(monkeypatch, tmp_path):
    def directory(*processors) -> str:
        (tmp_path / "cpuinfo").write_text("".join(CPUINFO.format(**one) for one in processors))
        return options.cache_directory().name

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(options, "Path", {"/proc/cpuinfo": tmp_path / "cpuinfo"}.__getitem__)
    without = options.cache_directory().name
    one = {"number": 0, "model": "A", "flags": "sse avx"}
    name = directory(one)
    assert directory(one | {"number": 7}, one) == directory(one, one, one) == name
    others = [name, without, directory(one | {"model": "B"}), directory(one | {"flags": "sse"})]
    assert len(set(others)) == 4
    assert all(re.fullmatch(rf"{platform.machine()}-[0-9a-f]{{8}}", other) for other in others)
    lines = sorted(CPUINFO.format(**one).splitlines())
    digest = hashlib.sha256("\n".join(line for line in lines if line[:5] in ("model", "flags")).encode()).hexdigest()
    assert name.endswith(digest[:8])


def test_cache_is_used_by_every_program_and_is_there_again_after_it_was_turned_off(jax_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep/er"))
    for _ in range(2):  # the second time the directory exists
        options.enable_compilation_cache()
        assert Path(jax.config.jax_compilation_cache_dir) == options.cache_directory()
        assert options.cache_directory().is_dir()
        jax.config.update("jax_compilation_cache_dir", None)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    for enabled in (False, True):
        jax.config.update("jax_enable_compilation_cache", enabled)
        with contextlib.suppress(RuntimeError), options.without_compilation_cache():
            assert not jax.config.jax_enable_compilation_cache
            raise RuntimeError
        assert jax.config.jax_enable_compilation_cache == enabled


def test_a_home_directory_that_is_unknown_names_the_variable_of_jax(jax_cache, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", "~/programs")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"^JAX_COMPILATION_CACHE_DIR='~/programs'"):
        options.enable_compilation_cache()
    monkeypatch.setattr(options, "user_cache", lambda: None)
    assert options.cache_directory() is None


def test_options_that_this_release_lacks_are_left_out(monkeypatch):
    known, other, unknown = ("xla_cpu_enable_fast_math", False), ("xla_cpu_enable_fast_min_max", True), ("xla_cpu_fast", 1)
    for tuned in ([], [known], [unknown], [known, other], [unknown, known], [known, unknown, other], [unknown, ("xla_no", 2)]):
        monkeypatch.setattr(options, "TUNED", {"cpu": dict(tuned)})
        expected = dict(one for one in tuned if one in (known, other))
        assert options.compiler_options(Config(), "cpu") == expected
        assert options.compiler_options(Config(compile=Compile(deterministic=True)), "cpu") == expected


def test_folded_batch_norm_is_compiled_without_products_in_triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(options, "TUNED", {})
    found = {form: options.compiler_options(Config(model=Model(batch_norm=form)), "gpu") for form in ("auto", "folded")}
    assert found == {"auto": {}, "folded": {"xla_gpu_enable_triton_gemm": False}}


def test_options_of_a_platform_do_not_reach_programs_of_other_platforms(monkeypatch):
    monkeypatch.setattr(options, "_supported", lambda *pairs: dict(pairs))
    exact = Config(compile=Compile(deterministic=True), model=Model(batch_norm="folded"))
    assert options.compiler_options(exact, "gpu")["xla_gpu_deterministic_ops"]
    for config in (Config(), exact):
        assert options.compiler_options(config, "tpu") == {}
        for kind in ("cpu", "gpu"):
            assert all(name.startswith(f"xla_{kind}_") for name in options.compiler_options(config, kind))


def test_without_a_directory_for_it_there_is_no_cache(jax_cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    options.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_cache_directory_set_in_jax_is_kept(jax_cache, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "set"))
    options.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "set")
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "~/set")
    options.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "set")


@pytest.mark.slow
def test_second_run_with_another_seed_compiles_nothing(tiny_resnet, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(tiny_resnet)))
    there = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    there |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}

    def counted(name, *more, **variables):
        line = [sys.executable, "-c", COUNT_COMPILATIONS, str(tmp_path / "config.json"), str(tmp_path / name), *more]
        ran = subprocess.run(line, env=there | variables, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    first, second, off = counted("first"), counted("second", "--seed", "1"), counted("off", JAX_ENABLE_COMPILATION_CACHE="0")
    assert first["cache_misses"] >= 4  # two training steps, two evaluations
    assert first["directory"].startswith(str(tmp_path / "cache/jaxdp/programs"))
    assert (second["cache_misses"], second["cache_hits"]) == (0, first["cache_misses"] + first["cache_hits"])
    assert (off["cache_hits"], off["cache_misses"]) == (0, 0)
    one, two, three = (latest_valid(tmp_path / name / "checkpoints").arrays for name in ("first", "second", "off"))
    assert one == three != two  # of another seed


@pytest.mark.slow
def test_tuned_options_compute_the_same_step(tiny_resnet, monkeypatch):
    found = {}
    for tuned in (True, False):
        if not tuned:
            monkeypatch.setattr(options, "TUNED", {})
        assert bool(options.compiler_options(tiny_resnet, "cpu")) == tuned
        one = build_step(tiny_resnet, make_mesh(1, 1), global_batch=8, strategy="torus")
        one.hyperparameters["learning_rate"] = np.float32(1.0)
        found[tuned] = jax.device_get(one())
    (params, metrics), (others, other_metrics) = found[True], found[False]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), params, others)
    assert metrics["gradient_norm"] == pytest.approx(other_metrics["gradient_norm"], rel=1e-5)


def test_without_the_cache_programs_are_neither_stored_nor_read(jax_cache, monkeypatch, tmp_path):
    """Although JAX has used its cache before, and uses it afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options.enable_compilation_cache()

    def files_after_compiling(value: float) -> int:
        jax.jit(lambda x: jnp.cos(x) * value).lower(np.float32(1.0)).compile()
        return len([*tmp_path.glob("jaxdp/programs/*/*-cache")])

    stored = files_after_compiling(1.0)
    with options.without_compilation_cache():
        assert files_after_compiling(2.0) == stored > 0
    assert files_after_compiling(3.0) == stored + 1
