"""Drawn timelines of pipelines agree with their tables."""

import re
import struct

import numpy as np
import pytest

from eqformer.parallel import draw_timeline, make_schedule, plot_timeline, SCHEDULES, simulate


KINDS = {"F": "forward", "B": "backward", "W": "weight"}
BOX = re.compile(r"([FBW])(\d+)([a-z]?)([>=-]*)|(\.+)")


def boxes(text):
    """What each device's row of a timeline holds: (kind, microbatch, chunk, first column, columns)."""
    found = []
    for row in text.splitlines()[1:]:
        name, row = row.split(" |")
        assert name.split() == ["device", str(len(found))] and row.endswith("|")
        matches = list(BOX.finditer(row[:-1]))
        assert sum(len(match.group()) for match in matches) == len(row) - 1  # nothing in between
        found.append(
            [
                (KINDS[match[1]], int(match[2]), ord(match[3] or "a") - ord("a"), match.start(), len(match.group()))
                for match in matches
                if match[1]
            ]
        )
    return found


def make(name, stages=4, microbatches=12):
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=SCHEDULES[name].chunks or 3)


@pytest.mark.parametrize("clock", ["lock_step", "asynchronous"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_text_can_be_read_back(name, clock):
    table = make(name)
    text = draw_timeline(table, backward=2.0, clock=clock)
    found = simulate(table, backward=2.0)
    timing, columns = getattr(found, clock), len(text.splitlines()[1].split("|")[1])
    for stage, row in enumerate(boxes(text)):
        mine = found.entries.stage == stage
        read = {(kind, k, chunk): (start, width) for kind, k, chunk, start, width in row}
        assert len(read) == len(row) == mine.sum()
        kinds = [list(KINDS.values())[kind] for kind in found.entries.kind[mine]]
        keys = list(zip(kinds, found.entries.microbatch[mine], found.entries.chunk[mine]))
        drawn = np.array([read[key] for key in keys]) * timing.total / columns
        column = timing.total / columns  # what rounding down to columns may lose
        assert np.abs(drawn[:, 0] - timing.starts[mine]).max() <= column
        assert np.abs(drawn.sum(axis=1) - timing.ends[mine]).max() <= column
        in_order = sorted(zip(timing.starts[mine], keys))
        assert [(kind, k, chunk) for kind, k, chunk, *_ in row] == [key for _, key in in_order]


def test_a_text_in_full():
    assert draw_timeline(make("zb-h1", 2, 3)).splitlines() == [
        "zb-h1, 2 stages, 3 microbatches: bubble 11.1 %, at most 2 microbatches in memory",
        "device 0 |F0F1..B0W0F2B1W1B2W2|",
        "device 1 |..F0B0F1B1W0F2B2W1W2|",
    ]
    assert draw_timeline(make_schedule("interleaved", stages=2, microbatches=2, chunks=2)).splitlines() == [
        "interleaved, 2 stages, 2 microbatches, 2 chunks: bubble 25.0 %, at most 2 microbatches in memory",
        "device 0 |F0aF1aF0bF1b......B0b---...B1b---B0a---B1a---|",
        "device 1 |...F0aF1aF0bB0b---F1bB1b---B0a---B1a---......|",
    ]


def test_what_costs_nothing_is_not_drawn():
    rows = boxes(draw_timeline(make("zb-h1", 2, 3), weight=0.0))
    assert {kind for row in rows for kind, *_ in row} == {"forward", "backward"}


@pytest.mark.grid
def test_a_picture_is_written(tmp_path):
    tables, path = [make(name, microbatches=8) for name in SCHEDULES], tmp_path / "schedules.png"
    plot_timeline(tables, path)
    image = path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and len(image) > 40_000
    width, height = struct.unpack(">II", image[16:24])
    assert width > 1200 and height > 1200
    plot_timeline(tables[0], tmp_path / "one.png", forward=1.0, backward=2.0, clock="asynchronous")
    assert 5_000 < len((tmp_path / "one.png").read_bytes()) < len(image)


def test_a_picture_shows_the_table(tmp_path):
    """Two tables that differ in order alone give different pictures, the same table the same one."""
    for name, each in (("a", "gpipe"), ("b", "1f1b"), ("c", "gpipe")):
        plot_timeline(make(each), tmp_path / name)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == c != b
