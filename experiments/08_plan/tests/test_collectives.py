"""Collectives in the text of a compiled program."""

from experiments.common.collectives import read_collectives


def test_collectives_are_read_from_a_program():
  name = 'metadata={op_name="jit(f)/while/body/while/body/dot"}'
  text = f"""
  %g.1 = f32[8,4]{{1,0}} all-gather(%x), channel_id=1, {name}
  %g.2 = (f32[2,4], f32[8,4]) all-gather-start(%x), channel_id=1, {name}
  %g.3 = bf16[16]{{0}} all-gather(%y), channel_id=2, {name}
  ROOT %r = (f32[4], bf16[2]) all-reduce(%z, %z), channel_id=3
"""
  assert read_collectives(text) == [
    ("all-gather", 2, 2, 128 + 32),
    ("all-reduce", -1, 1, 20),
  ]
