"""What `docs/extending.md` defines, run as whoever follows the page runs it: from outside the package."""

import functools
import re
import sys
import types
from pathlib import Path


PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


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
