"""Hooks of MkDocs: pages that are made of files outside docs/, and links between the two.

A document stays beside what it describes, where a code host shows it; on the site it is a page like the others.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "docker/README.md": "docker.md",
    "examples/mnist/README.md": "mnist.md",
    "examples/slurm/README.md": "slurm.md",
    "examples/kubernetes/README.md": "kubernetes.md",
}
"""File in the repository -> page of the site."""
ORIGINS = {page: origin for origin, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
EXTERNAL = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//")
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
COMMANDS = re.compile(r'<div class="language-bash.*?</code>', re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
HYPHENATED = re.compile(r"\S*-\S*")
SOURCE = re.compile(r"^ +Source = (\S+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}

log = logging.getLogger("mkdocs.hooks.hvd_trainer")


def on_config(config: MkDocsConfig) -> None:
    """Link every page to the repository, if setup.cfg has its address."""
    address = SOURCE.search((ROOT / "setup.cfg").read_text())
    config.repo_url = address[1] if address else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of PAGES, and one for each source file that a document links to."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    for document in [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        if not (ROOT / document).is_file():
            continue
        for link in LINK.findall((ROOT / document).read_text()):
            origin = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
            page = page_of(origin)
            if page.startswith("source/") and page not in files.src_uris and (ROOT / origin).is_file():
                files.append(File.generated(config, page, content=source_page(origin)))
    return files


def page_of(origin: str) -> str:
    """Return the page that shows a file or folder of the repository, relative to the site's root."""
    if origin == "README.md":
        return "index.md"
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    readme = posixpath.join(origin, "README.md")
    return PAGES.get(origin) or PAGES.get(readme) or f"source/{origin}.md"


def source_page(origin: str) -> str:
    """Return a page with the text of a source file, which the search leaves out."""
    language = LANGUAGES.get(posixpath.splitext(origin)[1], "text")
    text = (ROOT / origin).read_text().rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {origin}\n\n````{language}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    folder = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def rewrite(link: re.Match[str]) -> str:
        target = page_of(posixpath.normpath(posixpath.join(folder, link[1])))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark each word with a hyphen in commands and inline code, such as an option: docs/site.css breaks none."""
    html = CODE.sub(_mark_words, html)
    return COMMANDS.sub(lambda commands: TEXT.sub(_mark_words, commands[0]), html)


def _mark_words(text: re.Match[str]) -> str:
    return HYPHENATED.sub(r'<span class="word">\g<0></span>', text[0])


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load nothing from the network: warn of scripts, styles and pictures, which `--strict` refuses."""
    for found in EXTERNAL.findall(output):
        log.warning("%s loads something from the network: %s", page.file.src_uri, found)
    # With this mark Material's script asks the code host for the number of stars.
    return output.replace(' data-md-component="source"', "")
