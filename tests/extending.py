"""The modules that `docs/extending.md` defines, run as a reader of the page would run them: outside the package."""

import functools
import re
import sys
import types
from pathlib import Path


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)  # a block of Python in a page
PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@functools.cache
def beside(name: str) -> types.ModuleType:
    """Return the module of the page's block that begins with `# name.py`, and let other blocks import it by name."""
    (block,) = (
        block for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if block.startswith(f"# {name}.py\n")
    )
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(block, f"{PAGE.name}: {name}.py", "exec"), module.__dict__)
    return module
