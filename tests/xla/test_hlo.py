"""A compiled module, counted by hand."""

import pytest

from jaxdp.xla.hlo import read_schedule

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
