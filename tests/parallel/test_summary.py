import dataclasses
import math
from typing import Any

import jax
from plan_blocks import ngrams
from plan_models import BLOCKS, model_of, of_blocks, shapes, with_streams
from plan_parts import EMBED

from eqformer import nn, parallel
from eqformer.parallel import _layer_tables


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


def test_large_tables_that_stay_whole_are_told(monkeypatch):
    model = shapes(lambda: with_streams(of_blocks(ngrams)))
    rows = nn.modules(model, nn.NGramTable)[0].weight.shape[1]
    assert rows % 2 == 0 and rows % 7

    def told(zero: Any = 3, model: Any = model, fsdp: int = 1, tensor: int = 1) -> list[str]:
        mesh = parallel.make_mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor])
        plan = parallel.Plan(mesh, zero=zero, smallest=1)
        return [part for part in parallel.summary(plan, model, rows=6, seq=16).split("; ") if "table" in part]

    meshes = {"fsdp": 7}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2}
    assert [told(**mesh) for mesh in meshes] == [[], [], []]  # small tables are gathered
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 0)
    indivisible = f"a layer's table whole on each device, because fsdp does not divide its {rows} rows"
    over_tensor = f"a layer's table of {rows} rows not split over tensor"
    assert [told(**mesh) for mesh in meshes] == [[indivisible], [over_tensor], []]
    assert told(zero=1, fsdp=7) == []  # all parameters are whole under zero=1
    # Under both axes, a device gathers only its key heads' part of the table, which is small.
    values = shapes(lambda: model_of("values by id"))
    table = nn.modules(values, nn.ValueEmbedding)[0].weight
    assert table.shape[1] % 3
    monkeypatch.setattr(_layer_tables, "WHOLE_TABLE_BYTES", 4 * math.prod(table.shape[1:]) - 1)
    indivisible = f"a layer's table whole on each device, because fsdp does not divide its {table.shape[1]} rows"
    assert [told(model=values, fsdp=3, tensor=size) for size in (1, 2)] == [[indivisible], []]
