"""The page of dims in the docs equals the legend in the code."""

import pathlib
import re

from eqformer import LEGEND


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vocabulary.md"


def test_the_page_has_the_words_of_the_legend():
    page = PAGE.read_text()
    assert is_legend(page)
    assert not is_legend(page.replace("`rank`", "`ranks`")) and not is_legend(page.replace("query heads;", "queries;"))


def is_legend(page):
    _, legend = page.split("## The legend\n")
    table = re.findall(r"^\| (`.*) \| (.*) \|$", legend.partition("\n## ")[0], re.MULTILINE)
    rows = [(re.findall(r"`(\w+)`", words), meanings) for words, meanings in table]
    said = {
        word: meaning for words, meanings in rows for word, meaning in zip(words, meanings.split("; "), strict=True)
    }
    return said == LEGEND
