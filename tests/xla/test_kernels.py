"""Kernels by kind, counted by hand and, on the real step, against the multiply-adds of the model."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdp.cli.main import main
from jaxdp.xla import kernels

BATCH, SIDE, BEFORE, AFTER = 4, 6, 3, 5
LIMITS = {"bytes_per_second": 1e9, "flops": 1e12}
# The kernel of cuDNN's convolution as XLA compiles it for a GPU, of [256, 56, 56, 64] to [256, 56, 56, 64] with 3x3 taps.
CUDNN = """HloModule step

ENTRY %main (x: bf16[256,56,56,64], w: bf16[64,3,3,64]) -> (bf16[256,56,56,64], u8[16]) {
  %x = bf16[256,56,56,64]{3,2,1,0} parameter(0)
  %w = bf16[64,3,3,64]{3,2,1,0} parameter(1)
  %convert = bf16[256,56,56,64]{3,2,1,0} convert(%x), metadata={op_name="jit(step)/transpose(jvp(ResNet))/convert"}
  ROOT %cudnn-conv = (bf16[256,56,56,64]{3,2,1,0}, u8[16]{0}) custom-call(%x, %w), window={size=3x3 pad=1_1x1_1}, TARGET
}
"""


def gradients(images, kernel, matrix):
    def loss(images, kernel, matrix):
        y = lax.conv_general_dilated(jnp.tanh(images), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sin(y.reshape(-1, AFTER) @ matrix).sum()

    return jax.grad(loss, (0, 1, 2))(images, kernel, matrix)


def test_kernels_of_step_counts_convolutions_and_products_by_kind():
    inputs = jnp.ones((BATCH, SIDE, SIDE, BEFORE)), jnp.ones((3, 3, BEFORE, AFTER)), jnp.ones((AFTER, 7))
    step_kernels = kernels.kernels_of_step(jax.jit(gradients).lower(*inputs).compile().as_text(), BATCH)
    one = 2 * BATCH * SIDE**2 * 9 * BEFORE * AFTER + 2 * BATCH * SIDE**2 * AFTER * 7
    for row in kernels.summarize_by_kind(step_kernels, None, LIMITS):
        if row["kind"] in kernels.CONVOLUTIONS:
            assert row["kernels"] == 2
            assert row["flop"] == one
            assert row["least_seconds"] >= one / LIMITS["flops"]
    assert {one.side for one in step_kernels if one.kind in kernels.CONVOLUTIONS[:2]} == {SIDE}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ('custom_call_target="__cudnn$convForward", metadata={op_name="jit(step)/jvp(ResNet)/conv"}', 0),
        ('custom_call_target="__cudnn$convBackwardInput", metadata={op_name="jit(step)/transpose(jvp(ResNet))/conv"}', 1),
        ('custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="jit(step)/transpose(jvp(ResNet))/conv"}', 2),
    ],
)
def test_kernels_of_step_cudnn_convolution_returns_kind_bytes_and_flop(target, kind):
    convert, convolution = kernels.kernels_of_step(CUDNN.replace("TARGET", target), 256)
    assert convert == kernels.Kernel("convert", 56, "backward", 2 * 2 * 256 * 56 * 56 * 64, 0.0)
    moved = 2 * 2 * 256 * 56 * 56 * 64 + 2 * 9 * 64 * 64 + 16
    flop = 2.0 * 256 * 56 * 56 * 9 * 64 * 64
    assert convolution == kernels.Kernel("cudnn-conv", 56, kernels.CONVOLUTIONS[kind], moved, flop)


# The sum of h h^T over batch and positions, as XLA splits it for a GPU.
GRAM = """HloModule step

%gemm (a: bf16[128,1568,128], b: bf16[128,1568,128]) -> f32[128,128,128] {
  %a = bf16[128,1568,128]{2,1,0} parameter(0)
  %b = bf16[128,1568,128]{2,1,0} parameter(1)
  ROOT %dot = f32[128,128,128]{2,1,0} dot(%a, %b), DIMENSIONS
}

ENTRY %main (h: bf16[128,1568,128]) -> f32[128,128,128] {
  %h = bf16[128,1568,128]{2,1,0} parameter(0)
  ROOT %gram = f32[128,128,128]{2,1,0} fusion(%h, %h), kind=kCustom, calls=%gemm, metadata={op_name="OP"}
}
"""
GRAM = GRAM.replace("DIMENSIONS", "lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}")


@pytest.mark.parametrize(
    ("name", "kind"), [("jvp(R)/dot_general", "forward"), ("transpose(jvp(R))/dot_general", "weight gradient")]
)
def test_kernels_of_step_product_over_rows_counts_a_tensor_once(name, kind):
    (gram,) = kernels.kernels_of_step(GRAM.replace("OP", f"jit(step)/{name}"), 256)
    rows = 256 * 28 * 28
    assert gram == kernels.Kernel("gram", 28, kind, 2 * rows * 128 + 4 * 128**3, 2.0 * rows * 128 * 128)


def test_kernels_of_step_weights_larger_than_maps_returns_flop():
    text = CUDNN.replace("256,56,56,64", "32,7,7,512").replace("64,3,3,64", "512,3,3,512")
    target = 'custom_call_target="__cudnn$convForward", metadata={op_name="jit(step)/jvp(ResNet)/conv"}'
    _, convolution = kernels.kernels_of_step(text.replace("TARGET", target), 32)
    assert convolution.flop == 2.0 * 32 * 7 * 7 * 9 * 512 * 512


def test_profile_kernels_seconds_belong_to_the_kernels():
    step = jax.jit(gradients)
    inputs = jnp.ones((64, 32, 32, BEFORE)), jnp.ones((3, 3, BEFORE, AFTER)), jnp.ones((AFTER, 7))
    compiled = step.lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    seconds = kernels.profile_kernels(lambda: jax.block_until_ready(compiled(*inputs)), 2)
    step_kernels = kernels.kernels_of_step(compiled.as_text(), 64)
    rows = kernels.summarize_by_kind(step_kernels, seconds, LIMITS)
    assert all(row["seconds"] > 0 for row in rows if row["kind"] in kernels.CONVOLUTIONS)
    assert sum(row["seconds"] for row in rows) == pytest.approx(sum(seconds.get(one.name, 0) for one in step_kernels))


def test_summarize_by_kind_divides_the_time_of_a_cuda_graph_by_bytes():
    kinds = {"a": ("forward", 10), "b": ("rest", 1), "c": ("backward", 3), "d": ("convolution", 5), "e": ("rest", 2)}
    step_kernels = [kernels.Kernel(name, 7, kind, moved, 0.0) for name, (kind, moved) in kinds.items()]
    seconds = {"a": 7.0, "command_buffer_11": 6.0, "d": 5.0, "command_buffer_9": 8.0}  # 9 comes before 11

    def by_kind(seconds):
        divided = kernels.divide_graphs(step_kernels, seconds)
        return {row["kind"]: row["seconds"] for row in kernels.summarize_by_kind(step_kernels, divided, LIMITS)}

    assert by_kind(seconds) == {"forward": 7.0, "convolution": 5.0, "backward": 6.0, "rest": 2.0 + 6.0}
    del seconds["command_buffer_9"]  # which kernels the other one holds is unknown then
    assert by_kind(seconds) == {"forward": 7.0, "convolution": 5.0, "backward": 0.0, "rest": 0.0}


def test_most_above_least_sorts_by_the_time_lost():
    step_kernels = [
        kernels.Kernel(name, 7, "rest", moved, flop) for name, moved, flop in (("a", 10, 0), ("b", 0, 40), ("c", 1, 1))
    ]
    limits = {"bytes_per_second": 10.0, "flops": 10.0}
    rows = kernels.most_above_least(step_kernels, {"a": 3.0, "b": 5.0}, limits)  # c was not timed
    assert [(row["name"], row["seconds"], row["least_seconds"]) for row in rows] == [("a", 3.0, 1.0), ("b", 5.0, 4.0)]


@pytest.mark.slow
def test_bench_step_with_kernels_prints_time_by_kind(tmp_path, capsys):
    words = "bench step --model.depth 18 --model.width 8 --data.source synthetic --data.image-size 32 --mesh.cpu-devices 2"
    words += " --model.stem small --batch-size 8 --repeats 1 --seconds 0.1 --no-starts --kernels --output"
    main([*words.split(), str(tmp_path)])
    record = json.loads((tmp_path / "step.json").read_text())
    assert {"convolution", "input gradient", "weight gradient", "collective"} <= {
        row["kind"] for row in record["kernels"]["rows"]
    }
    flop = sum(row["flop"] for row in record["kernels"]["rows"])
    assert flop == pytest.approx(record["flop_an_image"] * 4, rel=0.05)
    assert "weight gradient" in capsys.readouterr().out
