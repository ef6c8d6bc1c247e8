"""Kernels and launches are read from the text of a compiled program."""

from experiments.common import hlo

PROGRAM = """
%body.1 (p: s32[]) -> s32[] {
  %f.1 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  %k.1 = (f32[4]{0}, s32[]) custom-call(%f.1), custom_call_target="x"
}
%inner.1 (p: s32[]) -> s32[] {
  ROOT %f.2 = s32[] fusion(%p), kind=kLoop, calls=%fused
}
%one.1 (p: s32[]) -> s32[] {
  ROOT %f.3 = s32[] copy(%p)
}
%two.1 (p: s32[]) -> s32[] {
  %f.4 = s32[] copy(%p)
  ROOT %f.5 = s32[] copy(%f.4)
}
%token.1 (p: s32[]) -> s32[] {
  %a.1 = s32[] bitcast(%p)
  %w.1 = s32[] while(%a.1), body=%body.1, {"known_trip_count":{"n":"3"}}
  %w.2 = s32[] while(%w.1), body=%inner.1
  ROOT %c.1 = s32[] conditional(%i, %w.2), branch_computations={%one.1, %two.1}
}
ENTRY %main.1 (p: s32[]) -> s32[] {
  %f.6 = s32[] copy(%p)
  ROOT %w.3 = s32[] while(%f.6), body=%token.1, {op_name="jit(f)/dec/while"}
}
"""


def test_launches_are_counted_with_loops_and_branches():
  """The first loop makes 3 turns; the second counts once; a branch waits."""
  assert hlo.launches(PROGRAM) == [("", 1, 0, 0), ("dec", 3 * 2 + 1 + 2, 3, 1)]


def test_kernels_are_counted_by_name():
  text = (
    '%k.3 = f32[4]{0} custom-call(%s), custom_call_target="tpu_custom_call"'
  )
  assert hlo.kernels(text) == {"k": 1}
