"""The distribution: its version, types and changelog, and one version of each tool."""

import pathlib
import re
import tomllib

import eqformer


ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = re.compile(r"\b(ruff|pyright)==([\w.]+)")


def test_the_version_is_said_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", eqformer.__version__)
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "eqformer/__init__.py"


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert versions[0][0] == eqformer.__version__
    assert all(re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", date) for _, date in versions)


def test_types_are_the_users_too():
    assert (ROOT / "eqformer" / "py.typed").read_text() == ""
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["eqformer"]  # with all that is in it


def versions_that_differ(text: str) -> set[str]:
    """Tools that a text pins in another version than the extra `test`."""
    wanted = dict(PINNED.findall(" ".join(PROJECT["project"]["optional-dependencies"]["test"])))
    return {name for name, version in PINNED.findall(text) if wanted[name] != version}


def test_hooks_run_the_tools_that_tests_run():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert len(PINNED.findall(hooks)) == 2 and versions_that_differ(hooks) == set()
    assert versions_that_differ("[ruff==0.0.1]") == {"ruff"}
