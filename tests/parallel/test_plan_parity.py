"""Any mesh, the same numbers: loss and gradients under a plan equal one device's, leaf by leaf."""

import pytest
from plan_parity import differences, one_device, planned

from eqformer.parallel import make_mesh, Plan


CASES = [
    ("llama", dict(fsdp=8), dict(zero=0)),
    ("llama", dict(fsdp=4, replica=2), dict(zero=1, accumulate=1)),
    ("gpt2", dict(fsdp=2, tensor=2, replica=2), dict(zero=1, accumulate=2)),
    ("llama", dict(fsdp=2, replica=2, expert=2), dict(zero=2)),
    ("llama", dict(fsdp=4, replica=2), dict(zero=3)),
    ("llama", dict(fsdp=2, tensor=4), dict(residual="replicated")),
    ("llama", dict(fsdp=2, tensor=4), dict(residual="sequence", zero=3)),
    ("jaxformer", dict(fsdp=2, tensor=4), dict(residual="sequence", remat="products")),
    ("gpt2", dict(fsdp=2, tensor=4), dict(residual="feature")),
    ("jaxformer", dict(fsdp=4, tensor=2), dict(residual="feature", zero=3, remat="products")),
]


def options_of(options: dict) -> tuple[dict, dict, int]:
    """What of a case's options is the plan's, the model's, and the number of microbatches."""
    ours = {name: options[name] for name in ("remat", "dtype") if name in options}
    plan = {name: value for name, value in options.items() if name not in ours and name != "accumulate"}
    return plan, ours, options.get("accumulate", 1)


def errors(family: str, mesh: dict, options: dict) -> dict[str, float]:
    """Where a plan's results differ from one device's."""
    plan, model, accumulate = options_of(options)
    return differences(
        planned(Plan(make_mesh(**mesh), **plan), family, accumulate, **model), one_device(family, **model)
    )


@pytest.mark.parametrize("family,mesh,options", CASES, ids=str)
def test_loss_and_gradients_equal_one_device(family, mesh, options):
    assert errors(family, mesh, options) == {}
