"""GPUs as XLA's compiler must know them to compile for one that is not there.

Figures from the device descriptions that OpenXLA publishes for compilation without a device (xla/backends/gpu/target_config).
"""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """name: as the driver gives it. Sizes in bytes, bandwidth in bytes a second, clocks in GHz, per core where it says so.

    matrix_rates: dtype -> multiply-adds that one of the four matrix units of a core does a clock.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    matrix_clock_ghz: float
    matrix_rates: dict
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    shared_memory_per_core: int
    links: int


AMPERE = {"f16": 256, "bf16": 256, "f32": 128, "f64": 16}
HOPPER = {"f16": 512, "bf16": 512, "f32": 256, "f64": 32}
CHIPS = {
    "a100": Chip(
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
    "h100": Chip(
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
CHIPS["h200"] = dataclasses.replace(
    CHIPS["h100"], name="NVIDIA H200 141GB HBM3e", memory_bytes=151_397_597_184, memory_bandwidth=4_800_000_000_000
)
# Numbers of XLA's PrimitiveType.
_DTYPES = {"f16": 10, "f32": 11, "f64": 12, "bf16": 16}


def target_config(chip: Chip) -> str:
    """The chip as XLA's GpuTargetConfigProto in text form."""
    major, minor = chip.compute_capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"

    def rates(unit: str, clock: float, units: dict, operations: dict) -> str:
        lines = [
            f"rate_infos {{ key: {number} value {{ clock_rate_ghz: {clock} units_per_core: {units[dtype]} "
            f"ops_per_clock: {operations[dtype]} }} }}"
            for dtype, number in _DTYPES.items()
        ]
        return "\n".join([f"{unit} {{", *lines, "}"])

    scalar = {"f16": chip.fpus_per_core, "bf16": chip.fpus_per_core, "f32": chip.fpus_per_core, "f64": chip.fpus_per_core // 2}
    return f"""gpu_device_info {{
threads_per_block_limit: 1024
threads_per_warp: 32
threads_per_core_limit: 2048
registers_per_core_limit: 65536
registers_per_block_limit: 65536
shared_memory_per_block: 49152
shared_memory_per_core: {chip.shared_memory_per_core}
shared_memory_per_block_optin: {chip.shared_memory_per_core - 1024}
core_count: {chip.cores}
fpus_per_core: {chip.fpus_per_core}
clock_rate_ghz: {chip.clock_ghz}
block_dim_limit_x: 2147483647
block_dim_limit_y: 65535
block_dim_limit_z: 65535
thread_dim_limit_x: 1024
thread_dim_limit_y: 1024
thread_dim_limit_z: 64
memory_bandwidth: {chip.memory_bandwidth}
device_memory_size: {chip.memory_bytes}
l2_cache_size: {chip.l2_bytes}
cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
{rates("scalar_unit_description", chip.clock_ghz, scalar, {"f16": 2, "bf16": 2, "f32": 1, "f64": 1})}
{rates("matrix_unit_description", chip.matrix_clock_ghz, dict.fromkeys(_DTYPES, 4), chip.matrix_rates)}
device_vendor: "NVIDIA Corporation"
platform_version: "Compute Capability {major}.{minor}{"a" if major >= 9 else ""}"
device_address_bits: 64
pcie_bandwidth: 34359738368
ecc_enabled: true
name: "{chip.name}"
driver_version: "13.0.0"
runtime_version: "13.0.0"
compile_time_toolkit_version: "13.0.0"
dnn_version: "9.28.0"
cub_version: "3.1.2"
device_interconnect_info {{ active_links: {chip.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
device_description_str: "{chip.name}"
"""
