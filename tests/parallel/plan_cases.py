"""Cases for the tests of plans: models, meshes and choices of a plan; a few for every run, the others for the grid."""

import itertools
from collections.abc import Iterator
from typing import Any

from plan_parity import Case


THREE = ("gpt2", "llama", "jaxformer")
ZERO = [{"zero": stage} for stage in range(4)]
TENSOR: list[dict[str, Any]] = [{"residual": "replicated"}]
TENSOR += [{"residual": r, "overlap": o} for r in ("sequence", "feature") for o in ("none", "ring", "bidirectional")]
CONTEXT = [{"context_method": method} for method in ("ring", "gather", "heads")]
PIPE: list[dict[str, Any]] = [{"schedule": name, "microbatches": 4} for name in ("gpipe", "1f1b", "zb-h1")]
PIPE += [{"schedule": name, "microbatches": 4, "stage_remat": True} for name in ("1f1b", "zb-h1")]
PIPE += [{"schedule": "gpipe", "microbatches": 4, "edges": "spread"}]
PIPE += [
    {"schedule": name, "microbatches": 2, "chunks": 2} for name in ("interleaved", "looping", "zb-v", "dualpipe-v")
]

# Every mesh axis, and every value of each choice, occurs at least once; test_exchange.py has the exchange of experts.
EVERY_RUN = [
    Case(
        "gpt2",
        {"replica": 2, "pipe": 2},
        {"zero": 1, "schedule": "dualpipe-v", "microbatches": 4, "chunks": 2},
    ),
    Case("jaxformer", {"tensor": 2}, {"residual": "replicated"}, "products"),
    Case(
        "llama",
        {"fsdp": 2, "pipe": 2, "context": 2},
        {"zero": 3, "smallest": 1, "schedule": "looping", "microbatches": 2, "chunks": 2, "context_method": "ring"},
        "full",
    ),
    Case(
        "llama",
        {"pipe": 2, "context": 2, "tensor": 2},
        {"schedule": "gpipe", "microbatches": 2, "edges": "spread"}
        | {"context_method": "heads", "residual": "sequence", "overlap": "ring"},
    ),
    Case(
        "llama",
        {"fsdp": 2, "pipe": 2, "context": 2},
        {"zero": 2, "schedule": "zb-h1", "microbatches": 2, "context_method": "gather"},
    ),
    Case(
        "llama",
        {"expert": 2, "pipe": 2, "tensor": 2},
        {"zero": 0, "schedule": "zb-v", "microbatches": 2, "chunks": 2}
        | {"residual": "feature", "overlap": "bidirectional"},
    ),
    Case("llama", {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2, "stage_remat": True}),
]
FURTHER = [
    Case("gpt2", {"tensor": 2}, {"residual": "feature", "overlap": "bidirectional"}, "products"),
    Case("jaxformer", {"tensor": 2}, {"residual": "feature", "overlap": "bidirectional"}, "products"),
    Case("jaxformer", {"tensor": 2}, {"residual": "replicated"}),
    Case(
        "llama",
        {"expert": 2, "pipe": 2, "tensor": 2},
        {"zero": 0, "schedule": "zb-v", "microbatches": 4, "chunks": 2, "residual": "replicated"},
    ),
    Case("llama", {"expert": 2, "pipe": 2}, {"zero": 0, "schedule": "zb-v", "microbatches": 4, "chunks": 2}),
    Case("jaxformer", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}, "products"),
    *(
        EVERY_RUN[0]._replace(
            mesh=mesh, choices=EVERY_RUN[0].choices | {"residual": "sequence", "overlap": "bidirectional"}
        )
        for mesh in ({"fsdp": 2, "pipe": 2, "tensor": 2}, {"replica": 2, "pipe": 2, "tensor": 2})
    ),
    Case("llama", {"replica": 2, "pipe": 2}, {"zero": 0, "schedule": "zb-v", "microbatches": 4, "chunks": 2}),
    Case("mixture", {"expert": 2}, {"expert_method": "exchange", "expert_factor": 0.5}),
]
EVERY_STEP = [
    Case(
        "five layers",
        {"pipe": 2},
        {"schedule": "interleaved", "microbatches": 2, "chunks": 2},
    ),
]


def grid() -> list[Case]:
    """Return all cases but `EVERY_RUN`; where cases are many, each has only one of the families `THREE`, in turn."""
    found = {case.name: case for case in (*FURTHER, *_alone(), *_pairs(), *_triples(), *_others(), *_unequal())}
    return [case for name, case in found.items() if name not in {case.name for case in EVERY_RUN}]


def step_grid() -> list[Case]:
    """Return the cases whose optimizer steps are compared with one device's, with several optimizers."""
    cases = [
        Case("gpt2", {"replica": 2, "fsdp": 4}, {"zero": 1}),
        Case(
            "llama", {"fsdp": 4, "tensor": 2}, {"zero": 2, "residual": "sequence", "overlap": "ring", "microbatches": 2}
        ),
        Case("jaxformer", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "feature"}, "products"),
        Case("gpt2", {"context": 4, "tensor": 2}, {"context_method": "heads"}),
        Case(
            "llama",
            {"fsdp": 2, "pipe": 2, "context": 2},
            {"zero": 3, "schedule": "looping", "microbatches": 2, "chunks": 2},
        ),
        Case("jaxformer", {"fsdp": 4, "pipe": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
        Case("gpt2", {"pipe": 4, "tensor": 2}, {"schedule": "gpipe", "microbatches": 4}),
        Case("windows", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 1, "residual": "sequence"}),
        Case("full norms", {"fsdp": 2, "tensor": 4}, {"zero": 3}),
        Case("llama lora", {"fsdp": 2, "tensor": 2}, {"zero": 3}, optimizer="adamw of factors"),
        Case("llama lora", {"fsdp": 2, "pipe": 2}, {"zero": 2, "microbatches": 2}, optimizer="muon of factors"),
        Case("latents lora", {"fsdp": 2, "context": 2}, {"zero": 2, "microbatches": 2}, optimizer="adamw of factors"),
        Case("shared mixture lora", {"expert": 2, "tensor": 2}, {"zero": 1}, optimizer="adamw of factors"),
        Case("shared mixture", {"fsdp": 2, "expert": 2}, {"zero": 3}),
        Case(
            "shared mixture",
            {"expert": 2, "pipe": 2},
            {"schedule": "interleaved", "microbatches": 2, "chunks": 2},
        ),
    ]
    split = EVERY_STEP[0]._replace(
        mesh={"fsdp": 2, "pipe": 2, "tensor": 2}, choices=EVERY_STEP[0].choices | {"zero": 1, "residual": "replicated"}
    )
    cases += [split, Case("five layers", {"fsdp": 2, "pipe": 2}, {"zero": 3, "schedule": "zb-h1", "microbatches": 2})]
    cases.append(Case("dense, then mixtures", {"pipe": 2}, {"schedule": "zb-v", "microbatches": 2, "chunks": 2}))
    muon = [case._replace(optimizer="muon") for case in (cases[1], cases[5], *cases[-2:])]
    muon += [case._replace(optimizer="normuon") for case in (cases[1], cases[4], cases[5])]
    free = (cases[1], cases[4], cases[5], cases[13], cases[14], split)
    muon += [case._replace(optimizer="schedule-free-adamw") for case in free]
    chosen = "normuon with up.weight=adamw with embedding=sgd"
    return cases + muon + [case._replace(optimizer=chosen) for case in (cases[1], cases[4], cases[-2])]


def _unequal() -> Iterator[Case]:
    """Yield pipelines whose stages have unequal numbers of layers, or different layers, under every schedule."""
    for choices, remat in zip(PIPE, itertools.cycle(("none", "products", "full"))):
        yield Case("five layers", {"pipe": 2, "fsdp": 2}, choices | {"zero": 2}, remat)
        yield Case("dense, then mixtures", {"pipe": 2}, choices, remat)
    v = {"schedule": "zb-v", "microbatches": 2, "chunks": 2}
    yield Case("five layers", {"pipe": 2, "context": 2}, v)
    yield Case("five layers", {"pipe": 4}, {"schedule": "zb-h1", "microbatches": 4})
    yield Case("dense, then mixtures", {"pipe": 2, "expert": 2}, v)
    yield Case("unlike stacks", {"pipe": 2, "tensor": 2}, {"microbatches": 2, "residual": "sequence"})
    yield Case("unlike stacks", {"pipe": 2, "tensor": 2}, {"microbatches": 2, "residual": "feature", "zero": 3} | v)
    yield Case("five layers lora", {"pipe": 2}, v)


def _turns() -> Iterator[tuple[str, str, int]]:
    """Return an endless iterator of family, remat and number of microbatches; each goes round by itself."""
    microbatches = itertools.cycle((1, 1, 2, 1, 2))
    return zip(itertools.cycle(THREE), itertools.cycle(("none", "products", "none", "full")), microbatches)


def _case(family: str, mesh: dict[str, int], choices: dict[str, Any], remat: str = "none", pieces: int = 1) -> Case:
    # A pipeline's choices already have `microbatches`; elsewhere each device needs a row in each microbatch.
    fits = "pipe" not in mesh and mesh.get("fsdp", 1) * mesh.get("replica", 1) * pieces <= 8
    return Case(family, mesh, choices | ({"microbatches": pieces} if fits and pieces > 1 else {}), remat)


def _stages(choices: dict[str, Any]) -> int:
    return 2 if "chunks" in choices else 4


def _alone() -> Iterator[Case]:
    for family in THREE:
        yield Case(family, {"replica": 8})
        yield Case(family, {"expert": 4, "replica": 2})
        for zero in ZERO:
            yield Case(family, {"fsdp": 8} if zero["zero"] % 2 else {"replica": 2, "fsdp": 2}, zero)
        for stream, size in itertools.chain(zip(TENSOR, itertools.cycle((2, 4, 8)))):
            yield Case(family, {"tensor": size}, stream)
        for method in CONTEXT:
            yield Case(family, {"context": 4}, method)
        for schedule in PIPE:
            yield Case(family, {"pipe": _stages(schedule)}, schedule)


def _pairs() -> Iterator[Case]:
    turns = _turns()
    for zero, stream in itertools.product(ZERO, TENSOR):
        family, remat, pieces = next(turns)
        sizes = {"fsdp": 2, "tensor": 4} if zero["zero"] % 2 else {"fsdp": 4, "tensor": 2}
        yield _case(family, sizes, zero | stream, remat, pieces)
    for zero, method in itertools.product(ZERO, CONTEXT):
        family, remat, pieces = next(turns)
        sizes = {"fsdp": 2, "context": 4} if zero["zero"] % 2 else {"fsdp": 4, "context": 2}
        yield _case(family, sizes, zero | method, remat, pieces)
    for zero, schedule in itertools.product(ZERO, PIPE):
        family, remat, _ = next(turns)
        yield _case(family, {"fsdp": 2, "pipe": _stages(schedule)}, zero | schedule, remat)
    for stream, method in itertools.product(TENSOR, CONTEXT):
        family, remat, pieces = next(turns)
        yield _case(family, {"context": 2, "tensor": 2}, stream | method, remat, pieces)
    for stream, schedule in itertools.product(TENSOR, PIPE):
        family, remat, _ = next(turns)
        yield _case(family, {"pipe": _stages(schedule), "tensor": 2}, stream | schedule, remat)
    for method, schedule in itertools.product(CONTEXT, PIPE):
        family, remat, _ = next(turns)
        yield _case(family, {"pipe": _stages(schedule), "context": 2}, method | schedule, remat)


def _triples() -> Iterator[Case]:
    """Yield cases with three axes of two devices; each axis's choices go round, so that many pairs of them meet."""
    kinds: dict[str, list[dict[str, Any]]] = {
        "replica": [{}],
        "fsdp": ZERO[::-1],
        "pipe": [choices | {"microbatches": 2} for choices in PIPE],
        "context": CONTEXT,
        "tensor": TENSOR,
    }
    turns = _turns()
    axes = ("fsdp", "pipe", "tensor"), ("fsdp", "context", "tensor"), ("replica", "fsdp", "tensor")
    axes += ("pipe", "context", "tensor"), ("fsdp", "pipe", "context"), ("replica", "fsdp", "pipe")
    for three, number in itertools.product(axes, range(8)):
        family, remat, pieces = next(turns)
        choices: dict[str, Any] = {}
        for axis in three:
            choices |= kinds[axis][(number + 3 * (axis == "fsdp")) % len(kinds[axis])]
        yield _case(family, dict.fromkeys(three, 2), choices, remat, pieces)


def _others() -> Iterator[Case]:
    """Yield cases with models outside `THREE`, and cases that join many choices."""
    yield Case("gpt2", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"})
    yield Case("llama", {"replica": 2, "fsdp": 2}, {"zero": 3, "smallest": 1, "microbatches": 2})
    sizes = {"replica": 2, "expert": 2, "tensor": 2}
    yield from (Case("gpt2", sizes, {"zero": 0, "microbatches": 2} | TENSOR[way]) for way in (0, 3))
    yield Case("shared mixture", {"expert": 2, "tensor": 2}, {"expert_method": "exchange", "expert_factor": 0.5})
    yield Case("five layers", {"pipe": 2}, {"schedule": "zb-v", "microbatches": 4, "chunks": 2})
    yield Case("dense, then mixtures", {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2})
    yield Case("llama", {"fsdp": 2, "context": 4}, {"zero": 2, "context_method": "ring"}, "full")
    yield Case(
        "gpt2",
        {"fsdp": 2, "pipe": 2, "tensor": 2},
        {"zero": 2, "schedule": "1f1b", "microbatches": 2, "residual": "feature", "overlap": "bidirectional"},
    )
    yield Case(
        "llama",
        {"fsdp": 2, "pipe": 2, "context": 2},
        {"zero": 1, "schedule": "zb-h1", "microbatches": 2, "context_method": "gather"},
    )
    yield Case("sublayers", {"pipe": 2, "tensor": 2}, {"schedule": "1f1b", "microbatches": 2, "residual": "sequence"})
    yield Case("batch mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "expert_method": "gather"})
    yield Case("jaxformer", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "sequence"}, "products")
    yield Case(
        "side by side", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2, "residual": "sequence"}
    )
    yield Case(
        "batch mixture",
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {"zero": 3, "residual": "sequence"} | {"expert_method": "gather"},
    )
    for model in ("shared mixture", "dense, then mixtures"):
        yield Case(
            model,
            {"expert": 2, "pipe": 2, "tensor": 2},
            {"expert_method": "exchange", "expert_factor": 0.5, "schedule": "1f1b", "microbatches": 2},
        )
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"fsdp": 4, "tensor": 2}, {"zero": 3, "residual": "replicated"}),
        ({"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "sequence", "overlap": "ring"}),
        ({"fsdp": 4, "tensor": 2}, {"zero": 2, "residual": "feature", "overlap": "bidirectional"}),
        ({"context": 4, "tensor": 2}, {"context_method": "ring", "residual": "sequence"}),
        ({"fsdp": 2, "context": 4}, {"zero": 3, "context_method": "gather"}),
        ({"context": 2, "tensor": 4}, {"context_method": "heads", "residual": "feature"}),
        ({"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2, "residual": "replicated"}),
    ]
    for model in ("tied", "long", "windows", "full norms", "side by side", "latents", "sublayers"):
        for (mesh, choices), remat in zip(layouts, itertools.cycle(("none", "products", "full"))):
            yield Case(model, mesh, choices, remat)
    for (mesh, choices), remat in zip(layouts[:-1], itertools.cycle(("full", "none", "products"))):
        yield Case("unlike stacks", mesh, choices, remat)
    for family, (mesh, choices) in itertools.product(THREE, layouts[:3]):  # small arrays are split too
        yield Case(family, mesh, choices | {"smallest": 1})
    for choices in TENSOR[:1] + TENSOR[1:5:2]:
        yield Case("bare norms", {"tensor": 4}, choices)
    yield Case("bare norms", {"fsdp": 2, "tensor": 2, "pipe": 2}, {"residual": "feature", "microbatches": 2, "zero": 3})
    yield Case("few full norms", {"tensor": 4}, {"residual": "replicated"})
    yield Case("few full norms", {"fsdp": 2, "tensor": 4}, {"residual": "sequence", "zero": 3})
    yield Case("tied", {"tensor": 8}, {"residual": "replicated"})
    yield from _mixtures()
    for (mesh, choices), remat in zip(layouts, itertools.cycle(("none", "products", "full"))):
        # "shared mixture" has a capacity, which counts whole rows: context parallelism cannot have it.
        for model in ("llama lora", "latents lora", *(["shared mixture lora"] if "context" not in mesh else [])):
            yield Case(model, mesh, choices, remat)
    yield Case("llama lora", {"fsdp": 2, "tensor": 2}, {"zero": 2, "residual": "feature", "smallest": 1})
    yield Case("side by side", {"tensor": 4}, {"residual": "feature"})


def _mixtures() -> Iterator[Case]:
    """Yield mixtures of experts over the axis `expert` alone, and together with each other axis."""
    ways: list[dict[str, Any]] = [
        {"expert_method": "gather"},
        {"expert_method": "exchange", "expert_factor": 0.5},
    ]
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"expert": 8}, {}),
        ({"expert": 2, "fsdp": 4}, {"zero": 1}),
        ({"expert": 4, "fsdp": 2}, {"zero": 2}),
        ({"expert": 2, "replica": 2, "fsdp": 2}, {"zero": 3}),
        ({"expert": 2, "tensor": 4}, {"residual": "replicated"}),
        ({"expert": 2, "tensor": 2}, {"residual": "sequence", "overlap": "ring"}),
        ({"expert": 2, "tensor": 2}, {"residual": "feature"}),
        ({"tensor": 4}, {"residual": "feature"}),
        ({"context": 2, "expert": 4}, {"context_method": "ring"}),
        ({"context": 2, "tensor": 2}, {"context_method": "gather", "residual": "sequence"}),
    ]
    stages: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"expert": 2, "pipe": 2}, {"schedule": "1f1b", "microbatches": 2}),
        ({"expert": 2, "pipe": 2, "fsdp": 2}, {"schedule": "zb-h1", "microbatches": 2, "zero": 3}),
        ({"expert": 2, "pipe": 2}, {"schedule": "interleaved", "microbatches": 2, "chunks": 2}),
        ({"expert": 2, "pipe": 2, "tensor": 2}, {"schedule": "gpipe", "microbatches": 2, "edges": "spread"}),
        ({"expert": 2, "pipe": 2, "context": 2}, {"schedule": "looping", "microbatches": 2, "chunks": 2}),
    ]
    for model in ("mixture", "shared mixture"):
        for (mesh, choices), way, remat in zip(
            layouts + stages, itertools.cycle(ways), itertools.cycle(("none", "products", "full"))
        ):
            if model == "mixture" or "context" not in mesh:  # "shared mixture": see `_others`
                yield Case(model, mesh, choices | way, remat)
    for (mesh, choices), way in zip(layouts + stages[1:2], itertools.cycle(ways)):
        yield Case("weighed inputs", mesh, choices | way)
        yield Case("latent experts", mesh, choices | way)
    for model in ("mixture", "choosing experts"):
        yield Case(model, {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2, "residual": "feature"})
    for mesh, choices in layouts:
        yield Case("batch mixture", mesh, choices)
        if "context" not in mesh:
            yield Case("choosing experts", mesh, choices)
