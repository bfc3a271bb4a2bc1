"""What `docs/extending.md` defines, run as whoever follows the page runs it: from outside the package."""

import functools
import re
import sys
import types
from pathlib import Path


PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@functools.cache
def section(title: str) -> types.ModuleType:
    """The names that the blocks of Python under `## title` define, all of them in one module."""
    text = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (found,) = (part for part in text if part.partition("\n")[0] == title)
    module = types.ModuleType("extending_" + re.sub(r"\W+", "_", title.lower()))
    sys.modules[module.__name__] = module  # where dataclasses look for the types of their fields
    for block in re.findall(r"^```python\n(.*?)^```", found, re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{PAGE.name}: {title}", "exec"), module.__dict__)
    return module


@functools.cache
def beside(name: str) -> types.ModuleType:
    """The module of a block of Python that begins with `# name.py`, as the page's other blocks import it."""
    (block,) = (block for block in blocks() if block.startswith(f"# {name}.py\n"))
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(block, f"{PAGE.name}: {name}.py", "exec"), module.__dict__)
    return module


def blocks(page: Path = PAGE) -> list[str]:
    """A page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
