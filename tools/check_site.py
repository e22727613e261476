"""Check the built site: every internal link and anchor leads somewhere, and nothing is loaded from
another host.

python tools/check_site.py SITE
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
NOT_LOADED = ("canonical", "alternate", "next", "prev")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a":
            if "name" in values:
                self.ids.add(values["name"])
            self.links.append(values.get("href", ""))
        elif tag in LOADING and values.get("rel") not in NOT_LOADED:
            self.loads.append(values.get(LOADING[tag], ""))


def problems(site: Path) -> list[str]:
    """Return what is wrong, one line each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site)
        for load in page.loads:
            if urlsplit(load).netloc:
                found.append(f"{name}: loads {load} from another host")
        # the page of a missing address stands anywhere: its links begin at the root
        for link in page.links + page.loads if name.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not link:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                found.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target.suffix == ".html":
                other = pages[site / target.relative_to(site.resolve())]
                if unquote(parts.fragment) not in other.ids:
                    found.append(f"{name}: {link} has no such anchor")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
