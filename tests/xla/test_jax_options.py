"""Global options of JAX: a run, its evaluation and its predictions are the same to the bit whatever the user has set."""

import contextlib
import dataclasses
import hashlib
import sys

import jax
import numpy as np
import pytest
from helpers.processes import TIMEOUT, TINY, popen
from helpers.runs import Recorder, train_shown
from helpers.step import with_parts
from safetensors.numpy import load_file

import jaxdp
from jaxdp import models
from jaxdp.config import Finetune, Phase
from jaxdp.doctor import checks
from jaxdp.errors import ConfigError
from jaxdp.inference.evaluate import evaluate_weights
from jaxdp.inference.export import export
from jaxdp.inference.load_run import load_run
from jaxdp.loggers.console import Screen
from jaxdp.parallel.forward_dtypes import inner_jaxprs
from jaxdp.run_records import read_log
from jaxdp.training.step_compiler import mesh_of, trace_train_step
from jaxdp.xla.jax_options import OWN, REFUSED, check, describe, jaxdp_jax_config, set_aside

pytestmark = pytest.mark.usefixtures("own_programs")

NOT_BOOLEAN = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_legacy_prng_key": "error",
}


def others():
    """A value other than jaxdp's for every option that has no effect on a run."""
    guards = {name: "disallow_explicit" for name in OWN if name.startswith("jax_transfer_guard")}
    booleans = {name: not value for name, value in OWN.items() if isinstance(value, bool)}
    return booleans | guards | NOT_BOOLEAN | {"jax_default_device": jax.devices()[1]}


@contextlib.contextmanager
def set_globally(options):
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in reversed(before.items()):
            jax.config.update(name, value)


@contextlib.contextmanager
def set_for_this_thread(options):
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            stack.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
        yield


def outcome(config, path):
    """Digest of the trained state, predictions, first gradient and exported files; losses of all steps; the evaluation."""
    train_shown(config, path, screen=Screen(quiet=True))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3)).astype(np.uint8)
    predicted = jaxdp.predict(path, pixels)
    gradient = jaxdp.first_gradient(config)
    evaluated = jaxdp.evaluate(None, path)
    for format, name in (("jaxdp", "weights.safetensors"), ("stablehlo", "model.jaxexport")):
        export(path, path / name, format=format)
    results = load_run(path).state, gradient, tuple(predicted), load_file(path / "weights.safetensors")
    arrays = {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in jax.tree.leaves_with_path(results)}
    digest = hashlib.sha256((path / "model.jaxexport").read_bytes())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    losses = [record["loss"] for record in read_log(path / "metrics.jsonl") if "loss" in record]
    return digest.hexdigest(), losses, evaluated["eval_loss"], evaluated["eval_accuracy"]


@pytest.mark.slow
def test_run_is_the_same_to_the_bit_with_every_option_set(tiny, tmp_path):
    assert others().keys() == OWN.keys()
    expected = outcome(tiny, tmp_path / "plain")
    for where in (set_globally, set_for_this_thread):
        with where(others()):
            assert outcome(tiny, tmp_path / where.__name__) == expected
            assert set_aside() == others()
    assert set_aside() == {}


@pytest.mark.slow
def test_fine_tuning_is_the_same_to_the_bit_with_every_option_set(tiny_resnet, tmp_path):
    train_shown(tiny_resnet, tmp_path / "origin", screen=Screen(quiet=True))
    weights = tmp_path / "weights.safetensors"
    export(tmp_path / "origin", weights)
    config = dataclasses.replace(tiny_resnet, finetune=Finetune(weights=str(weights), frozen_stages=1))
    expected = outcome(config, tmp_path / "plain"), evaluate_weights(weights, config)
    with set_globally(others()):
        assert (outcome(config, tmp_path / "set"), evaluate_weights(weights, config)) == expected


CONFIGS = {
    "lars": {"optimizer": {"average_decay": 0.9, "label_smoothing": 0.1, "clip_norm": 1.0}},
    "lamb, float16": {
        "optimizer": {"name": "lamb", "loss": "binary", "label_smoothing": 0.1, "loss_scale": "dynamic"},
        "model": {"dtype": "float16"},
    },
    "sgd, drop-path": {"optimizer": {"name": "sgd"}, "model": {"drop_path": 0.2}},
    "ring": {"reduce": {"strategy": "ring"}},
    "sharded": {"reduce": {"strategy": "torus", "update": "sharded"}},
    "accumulation, mixup": {
        "batch": (Phase(global_batch=16, per_worker_batch=2),),
        "data": {"augmentation": "digits", "mix": "mixup"},
    },
    "adamw, bfloat16, cutmix": {
        "optimizer": {"name": "adamw"},
        "model": {"dtype": "bfloat16"},
        "data": {"augmentation": "paper", "mix": "cutmix"},
    },
    "crop, RandAugment": {
        "data": {"augmentation": "random_resized_crop", "stored_size": 20, "auto_augment": "rand_augment"},
    },
    "padding, TrivialAugment": {"data": {"augmentation": "pad_and_crop", "auto_augment": "trivial_augment"}},
    "timm's RandAugment, jitter, erasing": {
        "data": {"auto_augment": "rand_augment_increasing"},
        "augment": {"color_jitter": (0.4, 0.4, 0.4, 0.1), "erase_probability": 0.5},
    },
}


def float64_values(jaxpr):
    """Values of a program that are float64 because an array does not state its dtype; values of Python numbers adapt."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if getattr(variable.aval, "dtype", None) == np.float64 and not variable.aval.weak_type:
                yield variable.aval, equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from float64_values(inner)


QUICK = ("sgd, drop-path", "sharded", "adamw, bfloat16, cutmix")


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, changes in CONFIGS.items()],
)
def test_every_array_of_a_step_states_its_dtype(tiny_resnet, changes):
    plan = jaxdp.plan(with_parts(tiny_resnet, **changes), 4)
    with jax.enable_x64(True):  # inside of the context that sets it aside
        mesh = mesh_of(plan.phases[0], jax.devices()[:4])
        traced = trace_train_step(plan.config, models.create(plan.config.model), plan.phases[0], mesh=mesh)
    assert [*float64_values(traced.jaxpr)] == []


def test_own_options_hold_in_a_decorated_function_and_are_undone_after_an_error():
    @jaxdp_jax_config()
    def dtype_and_fail():
        assert jax.numpy.ones(()).dtype == np.float32
        raise RuntimeError

    with jax.enable_x64(True):
        with pytest.raises(RuntimeError):
            dtype_and_fail()
        assert jax.numpy.ones(()).dtype == np.float64


def test_every_option_without_a_context_manager_is_refused_unless_it_has_the_default_of_jax():
    changed = {"jax_random_seed_offset": 3, "jax_disable_most_optimizations": True}
    changed |= {f"jax_error_checking_behavior_{kind}": "raise" for kind in ("nan", "divide", "oob")}
    assert changed.keys() == REFUSED.keys()
    check()
    for name, value in changed.items():
        default = jax.config.values[name]
        with set_globally({name: value}), pytest.raises(ConfigError, match=rf"{name}=.*use {default!r}, JAX's default"):
            check()


def test_own_options_are_set_inside_alone_and_yield_those_that_they_set_aside():
    with set_for_this_thread(others()):
        with jaxdp_jax_config() as without_effect:
            assert without_effect == others()
            assert set_aside() == {}
            assert {name: jax.config.values[name] for name in OWN} == OWN
        assert set_aside() == others()
    described = describe({"jax_enable_x64": True, "jax_thread_guard": False})
    assert described.endswith("no effect on a run: jax_enable_x64=True, jax_thread_guard=False")


@pytest.mark.slow
def test_debugging_of_jax_holds_during_a_run(tmp_path):
    """A run diverges at once: with JAX_DEBUG_NANS, JAX's error ends it; a run without NaN ends normally."""
    for rate, names_jax, code in (("0.1", False, 0), ("1e15", True, 1)):
        flags = ["--mesh.cpu-devices", "2", "--epochs", "1", "--schedule.warmup-epochs", "0", "--schedule.learning-rate", rate]
        command = [sys.executable, "-m", "jaxdp", "train", *TINY, *flags, "--workdir", str(tmp_path / rate)]
        process = popen(command, {"JAX_DEBUG_NANS": "1", "JAX_CHECK_TRACER_LEAKS": "1"})
        _, err = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, "FloatingPointError" in err) == (code, names_jax), err


def test_option_that_changes_or_breaks_a_run_and_cannot_be_set_aside_is_refused(tiny, tmp_path):
    with set_globally({"jax_random_seed_offset": 3}), pytest.raises(ConfigError) as error:
        train_shown(tiny, tmp_path / "run", screen=Screen(quiet=True))
    assert (error.value.field, error.value.value) == ("jax_random_seed_offset", 3)
    assert not (tmp_path / "run/checkpoints").exists()


def test_run_and_doctor_name_the_options_without_effect(tiny, tmp_path):
    screen, result = Recorder(), checks.CheckResult("variables")
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        train_shown(tiny, tmp_path, screen=screen)
        checks.check_variables(result)
    line = "these options of JAX have no effect on a run: jax_enable_x64=True, jax_numpy_rank_promotion=raise"
    assert screen.lines.count(line) == 1
    assert line in result.message
