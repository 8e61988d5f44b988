"""For mkdocs: makes pages, which readers of the repository also see, work on the site.

- A link to a file outside of docs/, such as `../notebooks/1_uneven_shards.ipynb`, becomes one to a copy on the site.
- A picture in SVG is put into the page, where it follows the page's switch between the light and the dark scheme. As an
  image it would follow the system's.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
_IMAGE = re.compile(r'<img alt="([^"]*)" src="([\w-]+\.svg)" */?>')
_STYLE = re.compile(r"<style>.*?</style>\s*", re.S)
_DARK = re.compile(r"@media \(prefers-color-scheme:dark\)\{(\.figure\{.*?\})\}", re.S)


def on_files(files: Any, config: Any) -> Any:
    """Puts copies of what pages link to beside the pages."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    pages = [page.content_string for page in files.documentation_pages()]
    for path in sorted({link for page in pages for link in _OUTSIDE.findall(page)}):
        name = path.removesuffix(".md") + ".txt" if path.endswith(".md") else path  # not a page of the site
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links at the copies."""
    return _OUTSIDE.sub(lambda link: f"](repository/{re.sub('[.]md$', '.txt', link[1])}", markdown)


def on_page_content(content: str, config: Any, **_: Any) -> str:
    """Puts pictures into the page, and their colours once."""
    folder = Path(config.docs_dir)
    pictures = {name: (folder / name).read_text() for _, name in _IMAGE.findall(content)}
    if not pictures:
        return content
    (style, *_) = _STYLE.findall(next(iter(pictures.values())))

    def picture(image: re.Match[str]) -> str:
        label = html.escape(html.unescape(image[1]), quote=True)
        return _STYLE.sub("", pictures[image[2]]).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

    return _DARK.sub(r"[data-md-color-scheme=slate] \1", style) + _IMAGE.sub(picture, content)
