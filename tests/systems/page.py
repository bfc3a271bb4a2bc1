"""The code of a page of the documentation as a module, without what it does when run."""

import pathlib
import re
import types


DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(page: str, block: int = 0) -> types.ModuleType:
    """What the block of Python with this number on the page defines."""
    code = BLOCK.findall((DOCS / page).read_text())[block]
    module = types.ModuleType(f"{page.removesuffix('.md').replace('-', '_')}_{block}")
    exec(compile(code, f"<{page}>", "exec"), vars(module))
    return module
