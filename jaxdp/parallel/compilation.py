"""Where XLA keeps compiled programs from one run to the next, and with which options it compiles them."""

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

from jaxdp.config import Compile, ConfigError

# By platform. cpu: the library that XLA has for matrix products takes reductions too, and leaves the convolutions to Eigen; one
# operation after another, each on all cores; vectors as wide as the processor has them.
# gpu: what travels together is ours to say (see `overlap`): a collective that waits for others to be combined with would have
# nothing left to hide behind; and the stages of several messages are under way at a time.
TUNED = {
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
# Deterministic forms of scatters, reductions and cuDNN's convolutions, and the choice of kernels without timing them.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def cache_directory(asked: str) -> Path | None:
    """Where compiled programs are kept unless JAX was told; None: nowhere.

    Programs for a CPU use what that kind of processor knows: hosts that share a home directory have a directory for each kind.
    """
    if asked == "off":
        return None
    if asked != "auto":
        return Path(asked).expanduser()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "jaxdp/programs" / _kind_of_processor()


def _kind_of_processor() -> str:
    """A short name of this processor and of what it knows."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    facts = {line for line in lines if line.split("\t")[0] in ("model name", "flags", "CPU part", "Features")}
    digest = hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def keep_programs(config: Compile) -> None:
    """Let JAX keep compiled programs in the directory that the config names, or, for `auto`, where it was told to before.

    Raises ConfigError where that directory was asked for and cannot be made; a default one that cannot is done without.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a run has many small programs
    if config.cache == "auto" and jax.config.jax_compilation_cache_dir:
        return
    directory = cache_directory(config.cache)
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if config.cache != "auto":
                raise ConfigError(
                    f"compile.cache: {config.cache!r} is not allowed; it cannot be made ({error.strerror}); give another "
                    "directory, auto or off"
                ) from None
            directory = None
    directory = directory and str(directory)
    if directory != jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()  # which otherwise stays where the first compilation found it


def options(config: Compile, platform: str) -> dict:
    """XLA's options for the programs of a run on "cpu" or "gpu", as `compile` of a lowered function takes them."""
    tuned = _known(*TUNED.get(platform, {}).items()) if config.tuned else {}
    return tuned | (DETERMINISTIC if config.deterministic else {})


@cache
def _known(*options: tuple[str, object]) -> dict:
    """Those that this release of XLA has: options of experiments come and go. All at once, for each trial is a compilation."""
    import jax

    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except Exception:  # by release: of several types
        return {name: value for one in options for name, value in _known(one).items()} if len(options) > 1 else {}
    return dict(options)
