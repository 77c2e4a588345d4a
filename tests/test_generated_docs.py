"""Pages that repeat the code say what the code says, and links between pages lead somewhere."""

import dataclasses
import re

import pytest

from tests.generated_docs import PARTS, ROOT, options, with_part
from torchtitan_cad.integration.titan022.cpu import enable_cpu

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("part", PARTS)
def test_generated_parts_are_up_to_date(part: str) -> None:
    path, generate = PARTS[part]
    assert path.read_text() == with_part(path.read_text(), part, generate()), "run `make docs`"


def test_every_option_is_described() -> None:
    enable_cpu()
    from torchtitan_cad.integration.config import Cad

    text = options()
    for field in dataclasses.fields(Cad):
        assert f"**`{field.name}`**" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        assert not link or (page.parent / link).exists(), link
    named = re.findall(r"`((?:docs|bench|tests|patches|train_configs|examples)/[\w/.-]+)`", text)
    for name in named:
        assert (ROOT / name).exists(), name


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
