"""Schedules over a V: device i of p holds the parts i and 2p-1-i, so that the first embeds and computes the loss.

In the formulas p is the number of stages (devices), m of microbatches, i a stage from 0; F, B and W are the times of a
whole device's forward, backward to its input, and backward to its weights, of a microbatch. An entry of one of its two
chunks takes half of that.
"""

from ._pack import pack_schedule, Work
from ._schedule import check_counts, Schedule, v_placement


# The work on a device's chunks: 0 on the way down the devices, 1 on the way back.
F0, F1 = ("forward", 0), ("forward", 1)
B0, B1 = ("backward", 0), ("backward", 1)
W0, W1 = ("weight", 0), ("weight", 1)


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """Zero-bubble over a V: ZB-V (Qi et al. 2023, section 6), called V-ZB in Qi et al. 2024 (arXiv:2405.15362).

    With m >= 2p-1 and W <= F <= B the bubble is (p-1) max(B, 2(B-W)) / 2, of devices that do not wait for each other's
    ticks. With F = B = W that is half of `zero_bubble`'s, and all of it because device i has nothing to begin with
    before entry i. A device remembers inputs of p microbatches, as in 1F1B, those that wait for their weight entry
    counted too. One entry a tick, `6m+p-1` ticks. Fewer microbatches run too, with a larger bubble.
    """
    check_counts("zero_bubble_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, enough = _Device(microbatches), max(microbatches, 2 * stages - 1)
        device.does(F0, times=2 * (stages - stage) - 1)
        device.does(F1, F0, times=stage)
        device.does(F1, B1, W1, times=stages - stage)
        while device.done[F1] < enough:
            device.does(*[F0] * (device.done[F0] < enough), B0, W0, F1, B1, W1)
        device.does(B0, B1, times=stage)
        device.does(B0, W0, times=stages - stage)
        for backward, weight in ((B1, W1), (B0, W0)):
            device.does(weight, times=device.done[backward] - device.done[weight])
        orders.append(device.turns)
    return pack_schedule("zb-v", orders, microbatches=microbatches, part_of=v_placement(stages))


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: DualPipeV (DeepSeek's DualPipe, 2025, after Qi et al.'s "cut-in-half").

    A forward of one chunk and a whole backward of the other, of different microbatches, share a tick, so that with
    m >= 2p devices in lock-step are idle for a time that does not grow with m, whatever F, B and W are: it is the
    schedule to take where these differ. The published bubble, of devices that do not wait for each other's ticks, is
    (p-1)(F+2B-W) / 2; here it is less, as a backward's message leaves before its weights' gradients are there. A device
    remembers inputs of `p + 1/2` microbatches, and what i+1 chunks need for their weights, half as much as in
    `zero_bubble_v`. `2m+5p-2` ticks. Fewer microbatches run too, with a larger bubble.
    """
    check_counts("dualpipe_v", stages, microbatches)
    orders = []
    for stage in range(stages):
        device, after = _Device(microbatches), stages - 1 - stage
        device.does(F0, times=2 * after)
        device.does(F0, F1, times=stage + 1)
        device.does(B1, W1, F1, times=after)
        # The last device has the same microbatch in both chunks at first, and cannot do both in one tick.
        device.does(*((F0, (B1, W1)) if after == 0 else [(F0, B1, W1)]), (F1, B0, W0))
        device.does((F0, B1, W1), (F1, B0, W0), times=max(microbatches, 2 * stages) - 2 * stages + stage)
        device.does((B1, W1), (F1, B0, W0), times=after)
        # Half of its last backwards put their weights off, for when the device would wait for others' messages.
        last = [B1, B0] * (stage + 1)
        device.does(*[(B1, W1) if backward == B1 else (B0, W0) for backward in last[: stage + 1]], *last[stage + 1 :])
        put_off = [W1 if backward == B1 else W0 for backward in last[stage + 1 :]] + [W0] * after
        for weight in put_off[:after]:
            device.does(weight, B0)
        device.does(*put_off[after:])
        orders.append(device.turns)
    return pack_schedule("dualpipe-v", orders, microbatches=microbatches, part_of=v_placement(stages))


class _Device:
    """A device's work in order: microbatches are numbered as each kind of work on a chunk is added, up to `most`."""

    def __init__(self, most: int):
        self.most, self.turns = most, list[tuple[Work, ...]]()
        self.done = dict.fromkeys((F0, F1, B0, B1, W0, W1), 0)

    def does(self, *turns: tuple, times: int = 1) -> None:
        """These one after the other, so many times; what stands in a tuple shares a tick."""
        for turn in turns * times:
            works = turn if isinstance(turn[0], tuple) else (turn,)
            numbered = [(kind, self.done[kind, chunk], chunk) for kind, chunk in works]
            for work in works:
                self.done[work] += 1
            if there := tuple(each for each in numbered if each[1] < self.most):
                self.turns.append(there)
