"""A module of XLA's TPU compiler, counted by hand."""

import pytest

from jaxdp.xla.tpu_hlo import hbm_bytes, read_schedule

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
MODULE = """HloModule small, is_scheduled=true

%begin () -> f32[] {
  %p = PART parameter(0)
  %g = f32[4096]{0:T(1024)S(1)} all-gather(%p), GROUPS, dimensions={0}
  ROOT %s = (PART, WHOLE, CONTEXT) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 () -> f32[] {
  %a = PART parameter(0)
  %b = WHOLE parameter(1)
  %c = CONTEXT parameter(2)
  %x = TENSOR parameter(3)
  %n = TENSOR negate(%x)
  %g = WHOLE all-gather(%a), GROUPS, dimensions={0}
  ROOT %t = (TENSOR, PART, WHOLE, CONTEXT) tuple(%n, %a, %g, %c)
}

%end () -> f32[] {
  %a = PART parameter(0)
  %b = WHOLE parameter(1)
  %g = WHOLE all-gather(%a), GROUPS, dimensions={0}
  ROOT %d = WHOLE custom-call(%b), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 () -> f32[] {
  %i = f32[64,128]{1,0:T(8,128)} parameter(0)
  %r = f32[64,128]{1,0:T(8,128)} all-reduce(%i), GROUPS, to_apply=%add
  ROOT %d = TENSOR dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={16,128}
}

%less () -> pred[] {
  %limit = s32[]{:T(128)} constant(7), metadata={op_name="jit(step)/while"}
  %c = (s32[]{:T(128)}, TENSOR) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body () -> f32[] {
  %c = (s32[]{:T(128)}, TENSOR) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %t = TENSOR get-tuple-element(%c), index=1
  %moved = TENSOR collective-permute(%t), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[]{:T(128)}, TENSOR) tuple(%i, %moved)
}

ENTRY %main () -> f32[] {
  %v = f32[1024]{0:T(1024)} parameter(0)
  %x = TENSOR parameter(1)
  %w = f32[64,128]{1,0:T(8,128)} parameter(2)
  %cs = (PART, f32[1024]{0:T(1024)}, CONTEXT) copy-start(%v)
  %cd = PART copy-done(%cs)
  %ss = ((f32[64,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:8], [0:128]}
  %sd = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%ss)
  %start = (PART, WHOLE, CONTEXT) fusion(%cd), kind=kCustom, calls=%begin
  %s0 = PART get-tuple-element(%start), index=0
  %s1 = WHOLE get-tuple-element(%start), index=1
  %s2 = CONTEXT get-tuple-element(%start), index=2
  %first = (TENSOR, PART, WHOLE, CONTEXT) fusion(%s0, %s1, %s2, %x), kind=kOutput, calls=%async_collective_fusion.1
  %x1 = TENSOR get-tuple-element(%first), index=0
  %f1 = PART get-tuple-element(%first), index=1
  %f2 = WHOLE get-tuple-element(%first), index=2
  %f3 = CONTEXT get-tuple-element(%first), index=3
  %on = (TENSOR, PART, WHOLE, CONTEXT) fusion(%f1, %f2, %f3, %x1), kind=kOutput, calls=%async_collective_fusion.1
  %y = TENSOR get-tuple-element(%on), index=0
  %o1 = PART get-tuple-element(%on), index=1
  %o2 = WHOLE get-tuple-element(%on), index=2
  %o3 = CONTEXT get-tuple-element(%on), index=3
  %done = WHOLE fusion(%o1, %o2, %o3), kind=kCustom, calls=%end
  %joined = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%sd), custom_call_target="ConcatBitcast"
  %own = TENSOR fusion(%w), kind=kCustom, calls=%all-reduce-scatter.3
  %loop = (s32[]{:T(128)}, TENSOR) while(%carry), condition=%less, body=%body
  ROOT %out = TENSOR add(%own, %y)
}
"""
TYPES = {
    "TENSOR": "f32[16,128]{1,0:T(8,128)}",
    "PART": "f32[1024]{0:T(1024)S(1)}",
    "WHOLE": "f32[4096]{0:T(1024)}",
    "CONTEXT": "u32[]{:S(2)}",
    "GROUPS": "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}",
}
for name, text in TYPES.items():
    MODULE = MODULE.replace(name, text)


def test_read_schedule_counts_asynchronous_collectives_once_and_traffic_of_the_hbm_alone():
    work = read_schedule(MODULE, 8)
    tensor = 4 * 16 * 128
    assert work.kernels == 3  # two negations, which carry the all-gather on, and the addition
    assert work.kernel_bytes == 4 * 1024 + 4 * 8 * 128 + 2 * 2 * tensor + 3 * tensor  # two copies, each read in HBM, first
    gather, scatter, permute = work.collectives
    assert (gather.operation, gather.operand_bytes, gather.groups, gather.asynchronous) == ("all-gather", 4096, ROWS, True)
    assert (gather.overlapped_kernels, gather.overlapped_bytes) == (2, 4 * tensor)
    assert (scatter.operation, scatter.operand_bytes, scatter.groups) == ("reduce-scatter", 4 * tensor, ROWS)
    assert not scatter.asynchronous
    assert (permute.operation, permute.operand_bytes, permute.count) == ("collective-permute", tensor, 7)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]{:T(128)}", 4),
        ("f32[12]{0:T(128)}", 4 * 128),
        ("bf16[8,7,7,64]{3,0,2,1:T(8,128)(2,1)}", 2 * 8 * 7 * 7 * 128),  # the channels are the last axis of a tile
        ("bf16[6,7,7,64]{0,3,2,1:T(8,128)(2,1)}", 2 * 128 * 7 * 7 * 64),  # the images are
        ("f32[100]{0:T(1024)S(1)}", 0),
        ("(f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, /*index=2*/s32[3]{0})", 4 * 8 * 128 + 12),
    ],
)
def test_hbm_bytes_are_padded_to_tiles(shape, expected):
    assert hbm_bytes(shape) == expected


def test_hbm_bytes_of_an_unknown_type_are_an_error_and_of_a_token_none():
    assert hbm_bytes("token[]") == 0
    with pytest.raises(ValueError, match="unknown type f6"):
        hbm_bytes("(f32[8]{0}, f6[8]{0})")
