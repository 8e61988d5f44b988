"""For mkdocs: links from pages to files outside of docs/, which readers of the repository follow, work on the site too.

A link such as `../notebooks/1_uneven_shards.ipynb` becomes one to a copy of the file on the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Put copies of what pages link to beside the pages."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    pages = [page.content_string for page in files.documentation_pages()]
    for path in sorted({link for page in pages for link in _OUTSIDE.findall(page)}):
        name = path.removesuffix(".md") + ".txt" if path.endswith(".md") else path  # not a page of the site
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links at the copies."""
    return _OUTSIDE.sub(lambda link: f"](repository/{re.sub('[.]md$', '.txt', link[1])}", markdown)
