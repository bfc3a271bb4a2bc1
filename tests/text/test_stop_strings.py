"""Stop strings end a text at the same character, however the text is divided into pieces."""

import itertools

import pytest

from eqformer.text._generate_texts import StopStrings


def pushed(pieces, stops):
    """The text, and how much of it was given out before its end."""
    filter = StopStrings(stops)
    text = "".join(filter.push(piece) for piece in pieces)
    return text + filter.finish(), len(text)


def literal(text, stops):
    """The text before the stop that is complete first and, of several, the longest."""
    ends = [(end, -len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    return text[: sum(min(ends))] if ends else text


def divisions(text):
    """Every way to divide a text into pieces."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        bounds = [0, *(number + 1 for number, cut in enumerate(cuts) if cut), len(text)]
        yield [text[start:stop] for start, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize("stops", [["ab"], ["aab", "ba"], ["b", "aaba"], ["abc", "c"], ["x"], ["aabac", "bac"], []])
def test_a_text_ends_at_one_character_for_every_division(stops):
    text = "aaabacab"
    assert {pushed(pieces, stops)[0] for pieces in divisions(text)} == {literal(text, stops)}


def test_only_what_may_begin_a_stop_is_held_back():
    assert pushed(["one tw", "o thr"], ["three"]) == ("one two thr", len("one two "))
    assert pushed(["one two"], ["three"]) == ("one two", len("one two"))  # the control: " t" goes on with "w"
    assert pushed(["ab"], "b") == ("a", 1)  # one string is one stop, and not its characters


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match=r"generate\(stop=\['a', ''\]\): a stop string must have at least 1 character"):
        StopStrings(["a", ""])
