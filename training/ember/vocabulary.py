"""Trains Ember's tokenizer: a byte-level BPE of 2,048 tokens made for copying.

A word should have the same tokens wherever it occurs, because most tasks of a model with five million parameters are to find a word and copy it. So a
space is a separate token before content words and numbers; it is part of the word only for some two hundred plain words that are never a name or a
value. Every digit, and every letter in a run of capitals, is one token. The punctuation of JSON is divided into fixed pieces.

    python -m training.ember.vocabulary
"""

import itertools
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.ember.chat import END, END_OF_TEXT, HERE, MARKS, SPECIAL, TEMPLATE_FILE, TOKENIZER_FILE, render
from training.ember.corpus.mixture import conversations
from training.ember.corpus.words import listed

SIZE = 2048
_PLAIN_WORDS = listed(
    """a about after again airport alone also am an and any are as asked at away back be belongs best better big but
    by call called came can carried code coordinates could country did do does down eat everybody false find for
    forget found free from get give go gone has have he help her here his home how if in is it its just know known
    left let lies life like lived living long lost made make many me model more morning most much my name named
    near need new night no nobody not now of off on one only or other our out own please plus minus remember saw
    say see she should small so some stands tell than thank that the their them there they thing this time to
    together told too true two under until up us use used very want wanted was way we well went were what when
    where which who will with would year years you your schema matches object old owner place play read run set
    that's these turn what's work works"""
)
_JSON_PIECES = (
    r'\{"type": "object", "properties": \{"',
    r'", "parameters": ',
    r'": \{"type": "(?:string|integer|boolean)"',
    r'": \{"type": "array", "items": \{"type": "string"\}',
    r', "enum": \["',
    r', "description": "',
    r'\}, "required": \["',
    r'\{"name": "',
    r'", "arguments": \{"',
    r'", "',
    r'": "',
    r'": \["',
    r'": ',
    r', "',
    r'\}, "',
    r'\{"',
    r'"\}+',
    r'"\]\}*',
    r"\}+",
)
# The pieces into which text is split before BPE. Alternatives in order: JSON pieces; a plain word with its space; a word; one capital, digit or other
# letter; line ends; any other character.
_PATTERN = "|".join(
    (
        *_JSON_PIECES,
        rf" (?:{'|'.join(sorted(_PLAIN_WORDS, key=len, reverse=True))})(?![\p{{L}}\p{{N}}_'])",
        r"\p{Lu}?\p{Ll}+",
        r"\p{L}",
        r"\p{N}",
        r"\n+",
        r"[^\p{L}\p{N}\n]",
    )
)


def train(samples: int = 12_000, seed: int = 7) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(MARKS),
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (_without_marks(render(one.messages, one.tools)) for one in itertools.islice(conversations(seed), samples))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _without_marks(text: str) -> str:
    for mark in (*SPECIAL, *MARKS):
        text = text.replace(mark, "\n")
    return text


def main() -> None:
    tokenizer = train()
    tokenizer.save(str(TOKENIZER_FILE))
    (HERE / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": None,
                "eos_token": END,
                "pad_token": END_OF_TEXT,
                "model_max_length": 4096,
                "clean_up_tokenization_spaces": False,
                "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8"),
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n",
        encoding="utf-8",
    )
    print(f"{tokenizer.get_vocab_size()} tokens written to {TOKENIZER_FILE.name}")


if __name__ == "__main__":
    main()
