"""The README as the site's first page, each tutorial as a page, and each source file that a page links to as a page.

Links are written as they lead in the repository: `../eqformer/nn/_mlp.py` on a page of docs/, `docs/data.md` in the
README. In the site the first leads to a page with the file's text, the second to the page itself. The same link thus
holds in both. A link to a notebook leads to its page, which shows the cells with the outputs that the notebook stores.
"""

import base64
import json
import os
import pathlib
import re

from mkdocs.structure.files import File, InclusionLevel


ROOT = pathlib.Path(__file__).parent.parent
DOCS = "docs"
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=[)\s])")


def in_site(path: str) -> str:
    """Where a file or folder of the repository stands in the site."""
    if path.startswith(f"{DOCS}/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix(f"{DOCS}/"))
    return f"source/{path}.md"


def rewritten(text: str, where: str, at: str) -> tuple[str, set[str]]:
    """A text whose links lead from `where` in the repository, with links that lead from page `at` of the site.

    Gives also the paths outside of docs/ that it links to.
    """
    outside: set[str] = set()

    def link(match: re.Match) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(where), match[1]))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs complains of it
        if not path.startswith(f"{DOCS}/"):
            outside.add(path)
        return os.path.relpath(in_site(path), os.path.dirname(at) or ".") + (match[2] or "")

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts), outside


def source_page(path: str) -> str:
    """The page of a source file, or of a folder with its files."""
    if (ROOT / path).is_dir():
        names = sorted(child.name for child in (ROOT / path).iterdir() if child.suffix == ".py")
        body = "\n".join(f"- `{name}`" for name in names)
    else:
        body = f"`````python\n{(ROOT / path).read_text(encoding='utf-8')}`````"
    return f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n{body}\n"


def notebook_page(notebook: dict, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page of Markdown with the stored outputs, and the images that the page shows by name."""
    download = f'<a href="../{name}.ipynb" download>Download this page as a notebook</a>'
    parts, images = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                image = f"{name}_{len(images) + 1}.png"
                images[image] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![]({image})")
    return "\n\n".join([*parts, download]) + "\n", images


def add_tutorials(files, config) -> None:
    """Add a page and its images for every notebook."""
    for path in sorted((ROOT / DOCS / "tutorials").glob("*.ipynb")):
        page, images = notebook_page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
        for name, content in images.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))


def on_files(files, config):
    """Add the first page, the tutorials, and a page for every file outside of docs/ that a page links to."""
    add_tutorials(files, config)
    text, linked = rewritten((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", "index.md")
    files.append(File.generated(config, "index.md", content=text))
    for file in files.documentation_pages():
        if file.src_uri != "index.md":
            linked |= rewritten(file.content_string, f"{DOCS}/{file.src_uri}", file.src_uri)[1]
    for path in sorted(linked):
        page = File.generated(config, in_site(path), content=source_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links to source files lead to their pages."""
    uri = page.file.src_uri
    return markdown if uri == "index.md" else rewritten(markdown, f"{DOCS}/{uri}", uri)[0]
