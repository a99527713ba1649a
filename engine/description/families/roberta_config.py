"""The config of RoBERTa and XLM-RoBERTa: BERT, with positions that start after the padding token's id."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.families import bert_config
from pilotlight.engine.description.families.bert_config import BertConfig
from pilotlight.engine.weights.config import whole_number


def parse_config(config: Mapping[str, Any]) -> BertConfig:
    parsed = bert_config.parse_config(config)
    is_default = config.get("pad_token_id") is None
    offset = 1 + (1 if is_default else whole_number(config, "pad_token_id", parsed.context_length))
    if offset >= parsed.context_length:
        raise CheckpointError(f"config.json has {parsed.context_length} positions, of which {offset} are never used")
    return replace(parsed, context_length=parsed.context_length - offset, first_position=offset)
