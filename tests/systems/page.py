"""The code of a page of the documentation, loaded as a module."""

import pathlib
import re
import types


DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(page: str, block: int = 0) -> types.ModuleType:
    """Return a module with the definitions of one Python block of a page; blocks are numbered from 0.

    Code under `if __name__ == "__main__"` does not run.
    """
    code = BLOCK.findall((DOCS / page).read_text())[block]
    module = types.ModuleType(f"{page.removesuffix('.md').replace('-', '_')}_{block}")
    exec(compile(code, f"<{page}>", "exec"), vars(module))
    return module
