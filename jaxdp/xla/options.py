"""XLA compiler options of a run, and the persistent cache of compiled programs."""

import contextlib
import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jaxdp.config import Config
from jaxdp.files import expand_user, user_cache

CACHE_OPTION, USES_CACHE = "jax_compilation_cache_dir", "jax_enable_compilation_cache"  # JAX's
CACHE_VARIABLE = CACHE_OPTION.upper()
# Options of every run, by platform. cpu: XLA's matrix product library also takes reductions, and Eigen the convolutions;
# operations run one after another, each on all cores, with the widest vectors of the processor. gpu: XLA must not combine
# collectives, because `parallel.allreduce` decides what is sent together, and a combined collective would have nothing left to
# overlap with; stages of several buckets run at the same time.
TUNED: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE",
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
        "xla_cpu_prefer_vector_width": 512,
    },
    "gpu": {
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    },
}
# With folded batch normalization XLA would also try its small float32 products in Triton.
# Without TF32 they compile slowly there: on an H100 the choice did not end within 90 s.
FOLDED = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
# Deterministic scatters, reductions and cuDNN convolutions; kernels are chosen without timing them. Kernels of CPUs and TPUs
# always are deterministic.
DETERMINISTIC: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_deterministic_ops": True}}


def cache_directory() -> Path | None:
    """The directory of compiled programs unless JAX has one; None without a home directory.

    CPU programs depend on the instructions of the processor, so hosts that share a home directory use one directory per
    processor type.
    """
    cache = user_cache()
    return None if cache is None else cache / "programs" / _processor_type()


def _processor_type() -> str:
    """A short name of this processor's model and instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {line for line in lines if line.split("\t")[0] in ("model name", "flags", "CPU part", "Features")}
    digest = hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def enable_compilation_cache() -> None:
    """Let JAX store compiled programs in the directory that is set in JAX, or else in `cache_directory`, if it can be created.

    JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a run has many small programs
    already, directory = getattr(jax.config, CACHE_OPTION), None
    if already:
        directory = expand_user(already, CACHE_VARIABLE)
    elif path := cache_directory():
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            directory = str(path)
    if directory != already:
        jax.config.update(CACHE_OPTION, directory)
        compilation_cache.reset_cache()  # otherwise JAX keeps the directory of the first compilation


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Programs are compiled, and neither read from nor stored in JAX's cache."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    enabled = getattr(jax.config, USES_CACHE)
    jax.config.update(USES_CACHE, False)
    compilation_cache.reset_cache()  # JAX decides at its first compilation whether it has a cache
    try:
        yield
    finally:
        jax.config.update(USES_CACHE, enabled)
        compilation_cache.reset_cache()


def compiler_options(config: Config, platform: str) -> dict:
    """The compiler options of a run on "cpu", "gpu" or "tpu", for `compile` of a lowered function."""
    tuned = TUNED.get(platform, {})
    if config.model.resolved_batch_norm == "folded":
        tuned = tuned | FOLDED.get(platform, {})
    return _supported(*tuned.items()) | (DETERMINISTIC.get(platform, {}) if config.compile.deterministic else {})


@cache
def _supported(*options: tuple[str, Any]) -> dict:
    """The options that this release of XLA supports; experimental ones come and go.

    All are tried together first, because each trial is a compilation.
    """
    import jax

    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except Exception:  # the type depends on the release
        return {name: value for option in options for name, value in _supported(option).items()} if len(options) > 1 else {}
    return dict(options)
