"""What mkdocs cannot do alone: files beside `docs` that pages link to join the site, and the built site is checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files beside `docs` that pages link to."""
    docs = Path(config["docs_dir"])
    for page in docs.rglob("*.md"):
        above = len(page.relative_to(docs).parts)  # so many steps up lead out of docs
        for up, target in LINK.findall(page.read_text(encoding="utf-8")):
            beside = up == "../" * above and (ROOT / target).is_file()
            if beside and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between the root and `docs` into links within the site."""
    if page.file.generated_by:
        return re.sub(r"\]\(docs/", "](", markdown)
    out = "../" * len(Path(page.file.src_uri).parts)
    return markdown.replace(f"]({out}", f"]({out.removesuffix('../')}")


def on_post_build(config: Any) -> None:
    """Refuses a site that loads something from elsewhere, or lacks a public name.

    Raises:
        PluginError: If it does.
    """
    site = Path(config["site_dir"])
    complaints = []
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"((?:https?:)?//[^\"]*)", text)
        found += re.findall(
            r"<link\b[^>]*\brel=\"(?:stylesheet|preconnect|icon)\"[^>]*\bhref=\"((?:https?:)?//[^\"]*)", text
        )
        complaints += [f"{page.relative_to(site)} loads {address}" for address in found]
    anchors = {
        anchor
        for page in site.glob("reference/*.html")
        for anchor in re.findall(r"\bid=\"([\w.]+)\"", page.read_text())
    }
    pages = "".join(page.read_text(encoding="utf-8") for page in Path(config["docs_dir"]).glob("reference/*.md"))
    for package in ["trainer_client", *re.findall(r"^::: ([\w.]+)$", pages, re.M)]:
        lacking = (name for name, paths in public_names(package) if anchors.isdisjoint(paths))
        complaints += [f"the reference lacks {name} of {package}" for name in lacking]
    if complaints:
        raise PluginError("\n".join(complaints))


def public_names(package: str) -> Iterator[tuple[str, set[str]]]:
    """What a package names in `__all__`, each with its paths: there, and where it comes from."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    if not path.exists():
        return  # a module or a function, shown with all that is public
    tree = ast.parse(path.read_text(encoding="utf-8"))
    origins = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            for name in ast.literal_eval(node.value):
                yield name, {f"{package}.{name}", origins.get(name, "")}
