"""A compiled module, counted by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.xla import hlo
from jaxdp.xla.hlo import read_schedule, replica_groups

ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))  # devices of a mesh of 2x4

MODULE = """HloModule small, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
}

%body (c: (s32[], bf16[10])) -> (s32[], bf16[10]) {
  %c = (s32[], bf16[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = bf16[10]{0} get-tuple-element(%c), index=1
  %moved = bf16[10]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %sum = bf16[10]{0} fusion(%moved, %x), kind=kLoop, calls=%adding
  ROOT %t = (s32[], bf16[10]{0}) tuple(%i, %sum)
}

ENTRY %main (a: f32[8], b: bf16[10]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[10]{0} parameter(1)
  %zero = s32[] constant(0)
  %started = ((f32[8]{0}), f32[8]{0}) fusion-start(%a), kind=kCustom, calls=%inner
  %kernel = f32[4,4]{1,0:T(8,128)} custom-call(%a), custom_call_target="__cublas$gemm"
  %view = f32[16]{0} bitcast(%kernel)
  %done = f32[8]{0} fusion-done(%started)
  %carry = (s32[], bf16[10]{0}) tuple(%zero, %b)
  %loop = (s32[], bf16[10]{0}) while(%carry), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %out = f32[8]{0} add(%done, %a)
}
"""


def test_read_schedule_counts_kernels_bytes_and_overlap():
    schedule = read_schedule(MODULE, 4)
    assert schedule.kernels == 1 + 6 + 1  # the product, the fusion of the loop six times, the addition
    assert schedule.kernel_bytes == (32 + 64) + 6 * 3 * 20 + 3 * 32
    first, second = schedule.collectives
    assert (first.operation, first.dtype, first.operand_bytes, first.count) == ("all-reduce", "f32", 32, 1)
    assert first.groups == ((0, 1), (2, 3))
    assert (first.asynchronous, first.overlapped_kernels, first.overlapped_bytes) == (True, 1, 96)
    assert (second.operation, second.dtype, second.operand_bytes, second.count) == ("collective-permute", "bf16", 20, 6)
    assert not second.asynchronous


def test_read_schedule_collective_in_loop_of_unknown_length_raises_value_error():
    unknown = MODULE.replace('{"known_trip_count":{"n":"6"}}', "{}")
    with pytest.raises(ValueError, match="the loop loop contains a collective, and its number of iterations is unknown"):
        read_schedule(unknown, 4)
    without = "\n".join(line for line in unknown.splitlines() if "collective-permute" not in line).replace("%moved", "%x")
    assert read_schedule(without, 4).kernels == 3  # counted once


# What the module above lacks: a loop in a loop, branches, a call, messages of several tensors, two messages at once.
NESTED = """HloModule nested, is_scheduled=true

%leaf (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %r = f32[2]{0} all-gather(%p), replica_groups={}
}

%inner (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%c), index=1
  ROOT %small = f32[2]{0} negate(%x)
}

%one (x: f64[3]) -> f64[3] {
  %x = f64[3]{0} parameter(0)
  ROOT %a = f64[3]{0} negate(%x)
}

%other (x: f64[3]) -> f64[3] {
  %x = f64[3]{0} parameter(0)
  ROOT %b = f64[3]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%outer (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %loop = (s32[], f32[2]{0}) while(%c), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %x = f32[2]{0} get-tuple-element(%loop), index=1
  ROOT %called = f32[2]{0} call(%x), to_apply=%leaf
}

ENTRY main (a: f32[8], b: bf16[10], c: f64[3]) -> f32[8] {
  a = f32[8]{0} parameter(0)
  %b = bf16[10]{0} parameter(1)
  %c = f64[3]{0} parameter(2)
  %first = (f32[8]{0}, bf16[10]{0}) all-reduce-start(%a, %b), replica_groups={{0,1}}, to_apply=%add
  %k1 = u8[5]{0} custom-call(%b), custom_call_target="x"
  %second = f32[8]{0} collective-permute-start(%a), source_target_pairs={{0,1}}
  %k2 = pred[7]{0} custom-call(%b, %missing), custom_call_target="x"
  %first_done = (f32[8]{0}, bf16[10]{0}) all-reduce-done(%first)
  %k3 = s64[2]{0} custom-call(%c), custom_call_target="x"
  %second_done = f32[8]{0} collective-permute-done(%second)
  %branch = f64[3]{0} conditional(%k2, %c, %c), branch_computations={%one, %other}
  ROOT %loop = (s32[], f32[2]{0}) while(%b), condition=%less, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
  %outside = f32[999]{0} negate(%a)
"""


def test_read_schedule_of_nested_computations_and_messages_at_once():
    """`a` has no %, so it is no operand; a name that is defined elsewhere has no bytes."""
    schedule = read_schedule(NESTED.replace("%a,", "a,"), 2)
    kernels = {"k1": 5 + 20, "k2": 7 + 20, "k3": 16 + 24, "one": 24 + 24, "small": 3 * 5 * (8 + 8)}
    assert (schedule.kernels, schedule.kernel_bytes) == (4 + 3 * 5, sum(kernels.values()))
    both = ((0, 1),)
    assert schedule.collectives == [
        hlo.CompiledCollective("all-reduce", "bf16", 20, both, 1, True, 2, kernels["k1"] + kernels["k2"]),
        hlo.CompiledCollective("collective-permute", "f32", 32, both, 1, True, 2, kernels["k2"] + kernels["k3"]),
        hlo.CompiledCollective("all-reduce", "f64", 24, both, 1, False, 0, 0),
        hlo.CompiledCollective("all-gather", "f32", 8, both, 3, False, 0, 0),
    ]
    together = read_schedule(NESTED.replace("  a =", "  %a ="), 2).collectives[0]
    assert (together.dtype, together.operand_bytes) == ("bf16 + f32", 20 + 32)


DTYPES = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat"}


@pytest.mark.parametrize("name", list(hlo.BYTES))
def test_bytes_are_those_of_the_dtype(name):
    kind = name.rstrip("0123456789")
    size = jnp.dtype(DTYPES[kind] + name.removeprefix(kind)).itemsize
    shape = f"({name}[3,2]{{1,0:T(8,128)}}, {name}[], token[], {name}[0,5])"
    assert hlo.num_bytes(shape) == 7 * size
    assert hlo.arrays(shape) == [(name, [3, 2]), (name, []), (name, [0, 5])]


def test_unbalanced_parentheses_raise_value_error():
    with pytest.raises(ValueError, match=r"unbalanced parentheses: add\(%x"):
        hlo.parse("ENTRY %main (a: f32[]) -> f32[] {\n  %y = f32[] add(%x, (%x)\n}")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_replica_groups_of_three_axes_are_those_of_numpy(order, chosen):
    """The axes of a group vary within it, the last one fastest; the groups follow the other axes."""
    sizes, axes = (2, 3, 4), list(order[:chosen])
    ids = np.arange(24).reshape(sizes)
    others = [axis for axis in range(3) if axis not in axes]
    expected = ids.transpose(others + axes).reshape(-1, np.prod([sizes[axis] for axis in axes]))
    mesh = ",".join(f"'{name}'={size}" for name, size in zip("xyz", sizes, strict=True))
    named = "{" + ",".join(f"'{'xyz'[axis]}'" for axis in axes) + "}"
    transposed = ",".join(map(str, others + axes))
    shape = ",".join(map(str, expected.shape))
    for form in (f"mesh[{mesh}] {named}", f"[{shape}]<=[2,3,4]T({transposed})"):
        assert replica_groups(f"channel_id=1, replica_groups={form}, x", 24) == tuple(map(tuple, expected.tolist())), form


def test_replica_groups_parses_every_form():
    for form, expected in [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", ROWS),
        ("replica_groups=[2,4]<=[8], x", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", COLUMNS),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'vertical'}, x", COLUMNS),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'horizontal'}, x", ROWS),
        ("replica_groups=mesh['vertical'=2,'horizontal'=4] {'vertical','horizontal'}, x", (tuple(range(8)),)),
        ("replica_groups={}, x", (tuple(range(8)),)),
        ("source_target_pairs={{0,1},{1,0}}, x", ((0, 1), (1, 0))),
    ]:
        assert replica_groups(form, 8) == expected, form
