"""The time of a recorded trace by kind of work and by module: every interval counts once."""

import pytest

from eqformer.program import module_of, Span, time_account, Work


TEXT = """HloModule jit_run

%fused_add (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %t = f32[8,8]{1,0} tanh(%p)
}

%fused_copy (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %u = f32[8,8]{0,1} transpose(%q), dimensions={1,0}
}

%body (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  %turned = f32[8,8]{1,0} fusion(%c), kind=kLoop, calls=%fused_copy, metadata={op_name="run/transpose(jvp(norm))/t"}
  ROOT %product = f32[8,8]{1,0} dot(%turned, %c), metadata={op_name="jit(run)/blocks/query/...i,oi->...o/dot_general"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %loop = f32[8,8]{1,0} while(%x), condition=%body, body=%body, metadata={op_name="jit(run)/while"}
  %zeros = f32[8,8]{1,0} broadcast(%x), dimensions={}
  %sum = f32[8,8]{1,0} all-reduce(%loop), to_apply=%body, metadata={op_name="jit(run)/shard_map/expert loads/psum"}
  ROOT %bent = f32[8,8]{1,0} fusion(%loop), kind=kLoop, calls=%fused_add, metadata={op_name="jit(run)/optimizer/tanh"}
}
"""
SPANS = [
    Span("a", "loop", 0.0, 6.0),
    Span("a", "turned", 1.0, 2.0),
    Span("a", "product", 2.0, 5.0),
    Span("b", "bent", 4.0, 5.0),  # beside the product: half of that second is each one's
    Span("b", "unknown", 5.0, 9.0),
    Span("b", "zeros", 8.0, 8.5),
]


def test_all_of_the_time_is_told_once():
    found = {(work.kind, work.module, work.is_backward): work.seconds for work in time_account(TEXT, SPANS)}
    assert found == pytest.approx(
        {
            ("products", "blocks.query", False): 2.5,
            ("copies", "norm", True): 1.0,
            ("elementwise", "optimizer", False): 0.5,
            ("loops", "", False): 2.0,  # before its body and after
            ("nothing", "", False): 2.0,
            ("fills", "", False): 0.5,
        }
    )
    assert sum(found.values()) == 8.5
    assert [work.seconds for work in time_account(TEXT, SPANS)] == sorted(found.values(), reverse=True)


def test_a_message_counts_where_nothing_else_works():
    """A device that waits in one takes no time from those that work; two that wait share it."""
    spans = [Span("a", "sum", 0.0, 4.0), Span("b", "product", 1.0, 2.0), Span("c", "sum", 2.0, 4.0)]
    found = {work.kind: work.seconds for work in time_account(TEXT, [*spans, Span("d", "loop", 0.0, 5.0)])}
    assert found == pytest.approx({"messages": 3.0, "products": 1.0, "loops": 1.0})


def test_no_operation_takes_no_time():
    assert time_account(TEXT, [Span("a", "unknown", 0.0, 1.0)]) == ()
    assert time_account(TEXT, [Span("a", "bent", 3.0, 4.0)]) == (Work("elementwise", "optimizer", False, 1.0),)


def test_a_modules_path_has_no_loops_and_no_sums():
    assert module_of(("jit", "run", "while", "body", "blocks", "query", "...i,oi->...o")) == "blocks.query"
