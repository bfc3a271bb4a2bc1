"""What `docs/extending.md` defines, run as whoever follows the page runs it: from outside the package."""

import functools
import re
import sys
import types
from pathlib import Path


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)  # of a page
PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@functools.cache
def beside(name: str) -> types.ModuleType:
    """The module of a block of Python that begins with `# name.py`, as the page's other blocks import it."""
    (block,) = (
        block for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if block.startswith(f"# {name}.py\n")
    )
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(block, f"{PAGE.name}: {name}.py", "exec"), module.__dict__)
    return module
