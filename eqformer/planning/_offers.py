"""What a search for plans found, as text; and a device's memory as people write it."""

import re
from collections.abc import Callable, Sequence

from ..nn import format_table
from ._absent import Compilation
from ._decode_plans import Served
from ._fitting import Candidate, Fitting
from ._forecast import Proposal
from ._tables import gigabytes


Spelled = Callable[[Candidate], str]  # a plan to what one types to have it


def bytes_of(text: str) -> int:
    """`80GB` (or `80G`) in bytes; raises a `ValueError` for anything else, such as a number without a unit."""
    found = re.fullmatch(r"([\d.]+) ?(?:([kmgt])(i?)b?|b)", text.strip(), re.IGNORECASE)
    try:
        power = 0 if found is None or not found[2] else " kmgt".index(found[2].lower())
        size = 0.0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** power
    except ValueError:  # of more than one point
        size = 0.0
    if not size >= 1:
        raise ValueError(
            f"bytes_of({text!r}): give what a device has as a number and a unit, such as 80GB (or 80G, of 10^9 bytes) "
            "or 141GiB (or 141Gi, of 2^30)."
        )
    return int(size)


def offers(found: Fitting, spelled: Spelled) -> str:
    """The plans that `fitting_plans` offers or, where nothing fits, what is too large."""
    if found.offered:
        each = (
            f"  {spelled(one)}: {gigabytes(step.total)}, sends {gigabytes(one.sent)} a step"
            for one, step in found.offered
        )
        return "\n".join(["as many devices would hold it by", *each])
    if found.least is None:
        return (
            f"no mesh of as many devices was found that fits, of {found.tried} that are possible: the state alone "
            f"(parameters, gradients, optimizer) takes {gigabytes(found.least_state)} at least; take more devices, or "
            "a smaller model (more pieces or a smaller batch make no difference to it)"
        )
    least, step = found.least
    stopped = f"; the search stopped after {found.traced} of {found.in_question} plans, those that send least"
    return (
        f"no mesh of as many devices was found that fits: the state does, with {gigabytes(least.state)}, but not the "
        f"temporaries of a step beside it, {gigabytes(step.total - least.state)} at least"
        f"{stopped if found.traced < found.in_question else ''}; take more devices, more microbatches, or a smaller "
        "batch or shorter rows"
    )


def proposals(found: Sequence[Proposal], spelled: Spelled) -> str:
    """The plans of `best_plans`, to be had in place of one that does not fit."""
    if not found:
        return "no other mesh over these devices was found that fits; take more devices, or a smaller batch or rows"
    each = (
        f"  {spelled(one.candidate)}: {gigabytes(one.held)}, at least {one.time.seconds:.3f} s a step" for one in found
    )
    return "\n".join(["by formulas, as many devices would hold it by", *each])


def servings(found: Sequence[Served], spelled: Callable[[Served], str]) -> str:
    """The ways of `best_decodes`, to be had in place of one that does not fit."""
    if not found:
        return "no mesh over these devices was found that holds the caches of a row; take more devices, or shorter rows"
    takes = lambda its: f"{gigabytes(its.total)}, {its.time.seconds:.4f} s a token of each row"
    each = (f"  {spelled(one)}: {takes(one.found)}" for one in found)
    return "\n".join(["by formulas, as many devices would hold it by", *each])


def ranking_table(found: Sequence[Proposal], made: Sequence[Compilation | None], spelled: Spelled, memory: int) -> str:
    """Format the plans of `best_plans` as they rank, beside what compilers made of them: None of what was not compiled.

    The seconds are a lower bound, and the MFU is an upper bound, as a roofline is.
    """
    table = [("seconds", "MFU", "held", "compiled", "verdict", "bound by", "flags")]
    for one, its in zip(found, made, strict=True):
        seconds, share = f">= {one.time.seconds:.3f}", f"<= {one.time.utilization:.1%}"
        held = gigabytes(one.held) if one.verdict else f">= {gigabytes(one.held)}"
        compiled = "" if its is None else its.failure if its.program is None else gigabytes(its.program.held)
        verdict = one.verdict or "not traced yet"
        if its is not None:
            verdict = "fits" if its.fits(memory) else "does not fit"
        table.append((seconds, share, held, compiled, verdict, one.time.bound, spelled(one.candidate)))
    return format_table(table)
