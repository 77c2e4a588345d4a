"""Pages that repeat the code say what the code says, and links between pages lead somewhere."""

import dataclasses
import re

import pytest

from tests.generated_docs import PAGE, ROOT, up_to_date
from torchtitan_cad.integration.titan022.cpu import enable_cpu

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_option_is_described() -> None:
    enable_cpu()
    from torchtitan_cad.integration.config import Cad

    assert PAGE.read_text() == up_to_date(), "run `make docs`"
    for field in dataclasses.fields(Cad):
        assert f"**`{field.name}`**" in PAGE.read_text()


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
