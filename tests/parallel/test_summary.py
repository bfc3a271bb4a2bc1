import dataclasses

from plan_models import BLOCKS, of_blocks, shapes
from plan_parts import EMBED

from eqformer import parallel


def test_a_plan_is_told_in_one_line():
    plan = parallel.Plan(parallel.make_mesh(fsdp=2, pipe=2, tensor=2), zero=1, schedule="1f1b", microbatches=4)
    line = "8 devices: fsdp 2 x pipe 2 x tensor 2; zero 1; replicated stream; 1f1b, 4 microbatches, bubble 25.0 %"
    assert parallel.summary(plan, shapes(lambda: of_blocks(*BLOCKS["mixture"])), rows=8, seq=16) == line


def test_how_tokens_reach_experts_goes_by_sizes():
    mixture, slots = (shapes(lambda name=name: of_blocks(*BLOCKS[name])) for name in ("mixture", "choosing experts"))
    plan = parallel.Plan(parallel.make_mesh(expert=8))
    told = lambda model, seq, **choices: parallel.summary(dataclasses.replace(plan, **choices), model, rows=8, seq=seq)
    assert told(mixture, 128) == "8 devices: expert 8; experts by exchange"  # 2 x 2 <= 8; 64 slots
    assert told(mixture, 126) == told(mixture, 128, microbatches=2).partition("; 2")[0]  # chance fills few slots
    assert told(mixture, 126).endswith("experts by gather")
    assert told(mixture, 128, expert_factor=4.5).endswith("experts by gather")  # which would send more
    plan = parallel.Plan(parallel.make_mesh(expert=8), expert_factor=8.0)
    max_tokens = 2**30 // (8 * 2 * 4 * EMBED)  # tokens whose rows a gather has room for at once
    assert [told(mixture, size).split()[-1] for size in (max_tokens, 2 * max_tokens)] == ["gather", "exchange"]
    assert told(mixture, 1, expert_method="exchange").endswith("experts by exchange")
    assert told(slots, 128, expert_method="exchange").endswith("experts by gather")  # experts choose
