"""The table of families in the docs holds the stored results of all cases, and the results are good enough."""

import json
import re
import sys
from pathlib import Path

import pytest
from test_published import FIXTURES, RECORDED, WITHOUT_DECODING

from eqformer import models


sys.path.append(str(FIXTURES))

from family_cases import CASES, EXACT
from family_covers import COVERS
from table import BETWEEN, FOUND, gathered, PAGE, table


WAS_FOUND = json.loads(FOUND.read_text())


def test_the_page_has_the_table_of_what_was_found():
    (written,) = BETWEEN.findall(PAGE.read_text())
    assert written == table(WAS_FOUND, COVERS)
    assert written != table(WAS_FOUND | {"llama plain": WAS_FOUND["llama plain"] | {"difference": 1e-3}}, COVERS)


def test_every_case_of_every_family_was_run_and_passed():
    assert (
        {f"{family} {case}" for family, cases in CASES.items() for case in cases} == RECORDED.keys() == WAS_FOUND.keys()
    )
    assert COVERS.keys() == CASES.keys() == {case.split()[0] for case in EXACT}
    for case, found in WAS_FOUND.items():
        is_decoded = found.get("decoding", case.split()[0] in WITHOUT_DECODING)
        assert found["import"] and is_decoded and found["export"], case
        assert 0 <= found["difference"] <= max(2e-5, 2 * RECORDED[case]["rounding"]), case
        assert ("exact" in found) == (case in EXACT) and found.get("exact", 0.0) <= 1e-10, case
        assert {"fsdp", "fsdp x tensor"} & {*found["layouts"]}, case
    for family, cases in CASES.items():
        layouts = {layout for case in cases for layout in WAS_FOUND[f"{family} {case}"]["layouts"]}
        reads = family in ("mpnet", "t5", "t5gemma", "t5gemma2")  # its layers read what no pipeline carries
        assert ("fsdp x pipe" in layouts) != reads, family
        has_experts = any("experts" in name for name in RECORDED[f"{family} {next(iter(cases))}"]["config"])
        assert ("fsdp x expert" in layouts) == has_experts, family


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", r"\[(\d+) load and save\]"),
        ("docs/families.md", r"\(Hugging Face folders\) of (\d+) families"),
        ("docs/changelog.md", r"\*\*(\d+) published families\*\*"),
    ],
)
def test_pages_state_how_many_families_have_a_published_format(page, sentence):
    families = [family for family in models.FAMILIES.values() if family.config.__module__.startswith("eqformer.")]
    stated = re.search(sentence, (PAGE.parents[1] / page).read_text())
    assert stated and int(stated[1]) == sum(family.model_type is not None for family in families)


def test_what_failed_is_not_found(tmp_path: Path):
    test = '<testcase name="test_over_data_and_heads[llama tied]"><properties><property name="layout" value="fsdp"/>{}'
    run = lambda what: tmp_path / f"{what}.xml"
    for what, body in (("passed", ""), ("failed", "<failure/>")):
        run(what).write_text(f"<testsuite>{test.format('</properties>' + body)}</testcase></testsuite>")
    found = gathered([str(run("passed"))], {})
    assert found == {"llama tied": {"layouts": ["fsdp"]}}
    assert gathered([str(run("failed"))], found)["llama tied"]["layouts"] == []
