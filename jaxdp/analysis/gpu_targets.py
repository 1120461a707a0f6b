"""Descriptions of GPUs with which XLA compiles for a GPU that is not installed.

The figures are OpenXLA's for compilation without a device (xla/backends/gpu/target_config).
"""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuTarget:
    """A GPU model. name: as reported by the driver. Sizes in bytes, bandwidth in bytes/s, clocks in GHz.

    matrix_rates: dtype -> multiply-adds per clock of one of the four matrix units of a core.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    matrix_clock_ghz: float
    matrix_rates: dict[str, int]
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    shared_memory_per_core: int
    links: int


AMPERE = {"f16": 256, "bf16": 256, "f32": 128, "f64": 16}
HOPPER = {"f16": 512, "bf16": 512, "f32": 256, "f64": 32}
GPU_TARGETS = {
    "a100": GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        matrix_clock_ghz=1.41,
        matrix_rates=AMPERE,
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_bytes=41_943_040,
        shared_memory_per_core=167_936,
        links=12,
    ),
    "h100": GpuTarget(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        matrix_clock_ghz=1.8295201,
        matrix_rates=HOPPER,
        memory_bytes=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        l2_bytes=52_428_800,
        shared_memory_per_core=233_472,
        links=18,
    ),
}
GPU_TARGETS["h200"] = dataclasses.replace(
    GPU_TARGETS["h100"], name="NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, memory_bandwidth=4_800_000_000_000
)
# Values of XLA's PrimitiveType.
_DTYPES = {"f16": 10, "f32": 11, "f64": 12, "bf16": 16}


def target_config(gpu: GpuTarget) -> str:
    """XLA's GpuTargetConfigProto of a GPU in text form."""
    major, minor = gpu.compute_capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"

    def rates(unit: str, *, clock: float, units: dict[str, int], operations: dict[str, int]) -> str:
        lines = [
            f"rate_infos {{ key: {number} value {{ clock_rate_ghz: {clock} units_per_core: {units[dtype]} "
            f"ops_per_clock: {operations[dtype]} }} }}"
            for dtype, number in _DTYPES.items()
        ]
        return "\n".join([f"{unit} {{", *lines, "}"])

    scalar = {"f16": gpu.fpus_per_core, "bf16": gpu.fpus_per_core, "f32": gpu.fpus_per_core, "f64": gpu.fpus_per_core // 2}
    scalar_rates = rates(
        "scalar_unit_description",
        clock=gpu.clock_ghz,
        units=scalar,
        operations={"f16": 2, "bf16": 2, "f32": 1, "f64": 1},
    )
    matrix_rates = rates(
        "matrix_unit_description",
        clock=gpu.matrix_clock_ghz,
        units=dict.fromkeys(_DTYPES, 4),
        operations=gpu.matrix_rates,
    )
    return f"""gpu_device_info {{
threads_per_block_limit: 1024
threads_per_warp: 32
threads_per_core_limit: 2048
registers_per_core_limit: 65536
registers_per_block_limit: 65536
shared_memory_per_block: 49152
shared_memory_per_core: {gpu.shared_memory_per_core}
shared_memory_per_block_optin: {gpu.shared_memory_per_core - 1024}
core_count: {gpu.cores}
fpus_per_core: {gpu.fpus_per_core}
clock_rate_ghz: {gpu.clock_ghz}
block_dim_limit_x: 2147483647
block_dim_limit_y: 65535
block_dim_limit_z: 65535
thread_dim_limit_x: 1024
thread_dim_limit_y: 1024
thread_dim_limit_z: 64
memory_bandwidth: {gpu.memory_bandwidth}
device_memory_size: {gpu.memory_bytes}
l2_cache_size: {gpu.l2_bytes}
cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
{scalar_rates}
{matrix_rates}
device_vendor: "NVIDIA Corporation"
platform_version: "Compute Capability {major}.{minor}{"a" if major >= 9 else ""}"
device_address_bits: 64
pcie_bandwidth: 34359738368
ecc_enabled: true
name: "{gpu.name}"
driver_version: "13.0.0"
runtime_version: "13.0.0"
compile_time_toolkit_version: "13.0.0"
dnn_version: "9.28.0"
cub_version: "3.1.2"
device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
device_description_str: "{gpu.name}"
"""
