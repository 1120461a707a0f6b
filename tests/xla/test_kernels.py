"""Kernels by kind, counted by hand and, on the real step, against the multiply-adds of the model."""

import contextlib
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdp.cli.main import main
from jaxdp.models.convolution import convolve
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


def gradients(images, kernel, matrix, stride=1):
    def loss(images, kernel, matrix):
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        y = lax.conv_general_dilated(jnp.tanh(images), kernel, (stride, stride), "SAME", **numbers)
        return jnp.sin(y.reshape(-1, AFTER) @ matrix).sum()

    return jax.grad(loss, (0, 1, 2))(images, kernel, matrix)


@pytest.mark.parametrize(("stride", "before"), [(1, BEFORE), (2, BEFORE), (1, BATCH)])
def test_kernels_of_step_counts_convolutions_and_products_by_kind(stride, before):
    """On a large map, and on one whose channels are as many as its images; zeros between strides are not counted."""
    inputs = jnp.ones((BATCH, stride * SIDE, stride * SIDE, before)), jnp.ones((3, 3, before, AFTER)), jnp.ones((AFTER, 7))
    compiled = jax.jit(gradients, static_argnums=3).lower(*inputs, stride).compile()
    step_kernels = kernels.kernels_of_step(compiled.as_text(), BATCH)
    one = 2 * BATCH * SIDE**2 * 9 * before * AFTER + 2 * BATCH * SIDE**2 * AFTER * 7
    rows = kernels.summarize_by_kind(step_kernels, None, LIMITS)
    assert {row["kind"] for row in rows} >= set(kernels.CONVOLUTIONS)
    for row in rows:
        if row["kind"] in kernels.CONVOLUTIONS:
            assert row["kernels"] == 2
            assert row["flop"] == one
            assert row["least_seconds"] >= one / LIMITS["flops"]
    assert {one.side for one in step_kernels if one.kind in kernels.CONVOLUTIONS[:2]} == {SIDE, stride * SIDE}


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


def test_kernels_of_step_forward_convolution_of_a_map_as_large_as_its_taps():
    """Even if the channels are as many as the images, as in the gradient of weights."""
    images, kernel = jnp.ones((BATCH, 3, 3, BATCH)), jnp.ones((3, 3, BATCH, AFTER))
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    compiled = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **numbers)).lower(images, kernel).compile()
    found = [one for one in kernels.kernels_of_step(compiled.as_text(), BATCH) if one.flop]
    assert [(one.kind, one.flop) for one in found] == [("convolution", 2 * BATCH * 9 * 9 * BATCH * AFTER)]


FORWARD = 'custom_call_target="__cudnn$convForward", metadata={op_name="jit(step)/jvp(ResNet)/conv"}'


def test_kernels_of_step_convolution_by_blocks_has_the_flop_of_7x7_taps_of_three_channels():
    """In the program and, by its name, in a call of cuDNN; a convolution of the same shapes has the FLOP of 4x4 taps."""
    images, kernel = jnp.ones((BATCH, 16, 16, 3)), jnp.ones((7, 7, 3, AFTER))
    text = jax.jit(partial(convolve, stride=2, method="cudnn")).lower(images, kernel).compile().as_text()
    [one] = [one for one in kernels.kernels_of_step(text, BATCH) if one.flop]
    assert (one.flop, one.side) == (pytest.approx(2 * BATCH * 8 * 8 * AFTER * 7 * 7 * 3), 9)  # 9x9 blocks
    cudnn = CUDNN.replace("256,56,56,64]{3,2,1,0} p", "256,57,57,16]{3,2,1,0} p").replace("64,3,3,64", "64,4,4,16")
    for scope, taps in {"": 4 * 4 * 16, "jit(convolve_by_blocks)/": 7 * 7 * 3}.items():
        _, one = kernels.kernels_of_step(cudnn.replace("TARGET", FORWARD.replace('conv"', f'{scope}conv"')), 256)
        assert one.flop == pytest.approx(2 * 256 * 56 * 56 * 64 * taps)


@pytest.mark.parametrize(("side", "filters"), [(4, 512), (7, 512), (4, 32)])
def test_kernels_of_step_weights_larger_than_maps_returns_flop(side, filters):
    """Also with as many filters as images."""
    text = CUDNN.replace("(bf16[256,56,56,64]{", f"(bf16[32,{side},{side},{filters}]{{").replace(
        "64,3,3,64", f"{filters},3,3,512"
    )
    text = text.replace("256,56,56,64", f"32,{side},{side},512")
    _, convolution = kernels.kernels_of_step(text.replace("TARGET", FORWARD), 32)
    assert convolution.flop == 2.0 * 32 * side**2 * 9 * 512 * filters


@pytest.mark.parametrize("filters", [128, 512])
def test_kernels_of_step_strided_convolution_has_the_flop_of_its_output(filters):
    """The output has fewer values than the input, or more."""
    text = CUDNN.replace("(bf16[256,56,56,64]{", "(bf16[256,28,28,FILTERS]{").replace("64,3,3,64", "FILTERS,3,3,64")
    _, convolution = kernels.kernels_of_step(text.replace("FILTERS", str(filters)).replace("TARGET", FORWARD), 256)
    assert convolution.flop == 2.0 * 256 * 28**2 * 9 * 64 * filters
    assert convolution.side == 56


# [batch 4, 6, 6, 3] and the same as rows have the side 6. Results and operands count; a tuple moves nothing itself.
SIDES = {
    **{"4,6,6,3": 6, "4,6,5,3": 0, "3,6,6,3": 0, "4,1,1,3": 1, "144,3": 6, "16,3": 2, "4,3": 0, "8,3": 0, "145,3": 0},
    **{"143,3": 0, "144": 0, "12,12,3": 0, "36,4": 3, "": 0, "2,4,6,6,3": 0},
}


@pytest.mark.parametrize("shape", SIDES)
@pytest.mark.parametrize("operation", ["jvp(R)/tanh", "transpose(jvp(R))/tanh"])
def test_kernels_of_step_side_and_kind_follow_from_the_largest_feature_map(shape, operation):
    text = f"""HloModule step

ENTRY %main (x: f32[{shape}]) -> f32[4,1,1,3] {{
  %x = f32[{shape}]{{0}} parameter(0)
  %pair = (f32[{shape}]{{0}}, f32[]) tuple(%x, %x)
  %wait = () custom-call(), custom_call_target="wait", metadata={{op_name="{operation}"}}
  %sent = f32[4,8,8,3]{{0}} all-reduce-start(%x), to_apply=%add
  %got = f32[4,8,8,3]{{0}} all-reduce-done(%sent)
  %twice = f32[{shape}]{{0}} add(%x, %x), metadata={{op_name="jit(step)/{operation}" source_file="transpose(jvp("}}
  ROOT %out = f32[5]{{0}} negate(%x), metadata={{op_name="jit(step)/{"a" * 300}/{operation}"}}
}}
"""
    size = 4 * int(jnp.prod(jnp.array([int(n) for n in shape.split(",") if n], jnp.int32)))
    side, kind = SIDES[shape], "rest" if not SIDES[shape] else "backward" if "transpose" in operation else "forward"
    assert kernels.kernels_of_step(text, 4) == [
        kernels.Kernel("wait", 0, "rest", 0, 0.0),
        kernels.Kernel("sent", max(side, 8), "collective", size + 4 * 4 * 8 * 8 * 3, 0.0),
        kernels.Kernel("twice", side, kind, 2 * size, 0.0),
        kernels.Kernel("out", side, kind, size + 4 * 5, 0.0),
    ]


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


def event(name, nanoseconds, **stats):
    return SimpleNamespace(name=name, duration_ns=nanoseconds, stats=stats.items())


def part(name, **inner):
    return SimpleNamespace(name=name, **inner)


GPU_EVENTS = [event("launch", 2_000, hlo_op="fusion.1"), event("graph", 500), event("launch", 1_000, hlo_op="fusion.1")]
CPU = part("/host:CPU", lines=[part("thread", events=[event("dot", 3_000)]), part("Stream", events=[event("dot", 1_000)])])
GPUS = [
    part("/device:GPU:1", lines=[part("Stream #1", events=[event("other", 9_000)])]),
    part("/device:GPU:0", lines=[part("Steps", events=[event("1", 9_000)]), part("Stream #1", events=GPU_EVENTS)]),
]


@pytest.mark.parametrize(
    ("planes", "seconds"), [([CPU], {"dot": 4e-6}), ([CPU, *GPUS], {"fusion.1": 3e-6, "graph": 0.5e-6})], ids=["cpu", "gpu"]
)
def test_read_trace_adds_the_events_of_the_newest_file(planes, seconds, tmp_path, monkeypatch):
    for name in ("2024", "2025"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "host.xplane.pb").touch()
    files = {str(tmp_path / "2025/host.xplane.pb"): SimpleNamespace(planes=planes)}
    monkeypatch.setattr(jax.profiler, "ProfileData", SimpleNamespace(from_file=files.__getitem__))
    assert kernels.read_trace(tmp_path) == pytest.approx(seconds)


def test_profile_kernels_returns_the_mean_of_the_calls(monkeypatch):
    calls, traced = [], []
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: contextlib.nullcontext(traced.append(str(folder))))
    monkeypatch.setattr(kernels, "read_trace", lambda folder: {"a": 6.0 * (traced == [str(folder)])})
    assert kernels.profile_kernels(lambda: calls.append(1), 4) == {"a": 1.5}
    assert len(calls) == 4


def test_rows_have_the_sums_of_each_kind_and_the_least_time_of_bytes_or_flop():
    """6 bytes and 30 FLOP take 3 s; a kernel that the profile lacks adds no time."""
    numbers = [("a", "rest", 4, 10.0), ("b", "forward", 2, 0.0), ("c", "rest", 6, 30.0), ("d", "rest", 0, 0.0)]
    step_kernels = [kernels.Kernel(name, 7, kind, moved, flop) for name, kind, moved, flop in numbers]
    limits = {"bytes_per_second": 2.0, "flops": 20.0}
    forward = {"kind": "forward", "kernels": 1, "bytes": 2, "flop": 0.0, "least_seconds": 1.0}
    rest = {"kind": "rest", "kernels": 3, "bytes": 10, "flop": 40.0, "least_seconds": 2.0 + 3.0 + 0.0}
    assert kernels.summarize_by_kind(step_kernels, None, limits) == [forward, rest]
    seconds = {"a": 5.0, "c": 7.0, "b": 1.0}
    assert kernels.summarize_by_kind(step_kernels, seconds, limits) == [forward | {"seconds": 1.0}, rest | {"seconds": 12.0}]


def test_a_graph_whose_kernels_move_at_most_a_byte_has_its_time():
    few = [kernels.Kernel(name, 0, "rest", moved, 0.0) for name, moved in (("a", 1), ("b", 0), ("c", 9), ("d", 0))]
    graphs = {"command_buffer_1": 6.0, "c": 2.0, "command_buffer_2": 3.0}
    assert kernels.divide_graphs(few, graphs) == {"a": 6.0, "b": 0.0, "c": 2.0, "d": 0.0}


def test_most_above_least_returns_the_five_kernels_that_lose_most():
    step_kernels = [kernels.Kernel(str(lost), 7, "rest", 10, 0) for lost in (3, 6, 1, 5, 2, 4, 7)]
    rows = kernels.most_above_least(step_kernels, {one.name: 1.0 + int(one.name) for one in step_kernels}, LIMITS)
    assert [row["name"] for row in rows] == ["7", "6", "5", "4", "3"]


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
    words += " --model.stem small --batch-size 8 --repeats 1 --seconds 0.1 --kernels --output"
    main([*words.split(), str(tmp_path)])
    record = json.loads((tmp_path / "step.json").read_text())
    assert {"convolution", "input gradient", "weight gradient", "collective"} <= {
        row["kind"] for row in record["kernels"]["rows"]
    }
    flop = sum(row["flop"] for row in record["kernels"]["rows"])
    assert flop == pytest.approx(record["flop_an_image"] * 4, rel=0.05)
    assert "weight gradient" in capsys.readouterr().out
