"""Published models are planned by their class, or refused with the nearest supported class; docs/models.md lists both."""

from pathlib import Path

from pilotlight.engine.description.config_registry import PAGE
from tests.models_page import ROOT, published, render


def test_most_published_models_are_accepted_and_the_others_are_refused_by_name() -> None:
    rows = published()
    refused = {row.name: row.refusal for row in rows if row.refusal is not None}
    assert len(rows) == 87
    assert len(rows) - len(refused) >= 70
    for refusal in refused.values():
        assert refusal is not None
        assert refusal.startswith("not supported here")
        assert PAGE in refusal
    assert "compressed from several tokens" in str(refused["deepseek-ai/DeepSeek-V4-Flash"])
    assert "the nearest is DeepseekV3ForCausalLM" in str(refused["deepseek-ai/DeepSeek-V4-Flash"])
    assert "keep only the largest activations" in str(refused["google/gemma-3n-E4B-it"])
    assert "deepseek-ai/DeepSeek-V3.2" not in refused
    assert not [name for name in refused if "gemma-4" in name]


def test_the_page_of_supported_models_is_what_the_registry_and_the_tests_have() -> None:
    page = Path(ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render(), "the page is stale: run python -m tests.models_page"
