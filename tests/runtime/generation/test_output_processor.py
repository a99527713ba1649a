"""Tokens to deltas: the result does not depend on how the tokens are grouped into outputs."""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import TokenLogprobs, TokenOutput
from pilotlight.engine.text.formats import AnswerFormat, Thinking, raw_parser
from pilotlight.engine.text.formats.format_registry import FORMATS
from pilotlight.engine.text.formats.tools.thinking import TAGS as THINK_TAGS
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.api.builders.logprobs import echoed_logprobs
from pilotlight.runtime.generation.output_processor import Delta, DivergedError, OutputProcessor, StopMatcher, joined
from tests.fakes import EOS, byte_tokenizer, ids

TOKENIZER = Tokenizer.from_json(byte_tokenizer().to_str(), {})


HERMES = next(each for each in FORMATS if each.name == "hermes")
ANSWERS = AnswerFormat(TOKENIZER, HERMES, THINK_TAGS[0])


def processor(
    *stop: str, tools: bool = False, thinks: bool = False, whole: bool = False, one: bool = False
) -> OutputProcessor:
    thinking = Thinking.OPEN if thinks else Thinking.CLOSED
    parser = ANSWERS.parser(thinking, {"f": {}} if tools else {})
    hidden = frozenset({EOS})
    return OutputProcessor(parser, stop=stop, hidden_token_ids=hidden, whole_calls=whole, one_call_only=one)


def called(delta: Delta) -> list[tuple[str, str]]:
    return [(call.name, arguments) for call, arguments in delta.calls]


def run(made: OutputProcessor, groups: list[tuple[int, ...]], finish: str = "stop") -> list[Delta]:
    deltas = []
    for position, group in enumerate(groups):
        last = position == len(groups) - 1
        made.push(TokenOutput("s", group, finish_reason=finish if last else None))
        if (delta := made.take()) is not None:
            deltas.append(delta)
        if made.finish_reason is not None:
            break
    return deltas


def cut(tokens: tuple[int, ...], seed: int) -> list[tuple[int, ...]]:
    cuts = sorted(random.Random(seed).choices(range(len(tokens) + 1), k=4))
    return [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


TEXTS = st.text(alphabet="ab<E\u00e9\u65e5 \n", max_size=30)


@given(
    text=TEXTS,
    stops=st.lists(st.text(alphabet="abE\u00e9", min_size=1, max_size=3), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str], seed: int) -> None:
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    made = processor(*stops)
    deltas = run(made, cut((*ids(text), EOS), seed))
    assert deltas[-1].finish_reason == made.finish_reason == "stop"
    assert "".join(delta.text for delta in deltas) == (text[: min(found)[1]] if found else text)


@given(
    text=TEXTS, stops=st.lists(st.text(alphabet="abE", min_size=1, max_size=3), max_size=3), seed=st.integers(0, 2**32)
)
def test_the_matcher_does_not_depend_on_how_text_is_cut(text: str, stops: list[str], seed: int) -> None:
    def shown(chunks: list[str]) -> str:
        matcher, out = StopMatcher(tuple(stops)), ""
        for chunk in chunks:
            safe, is_stopped = matcher.push(chunk)
            out += safe
            if is_stopped:
                return out
        return out + matcher.finish()

    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(chunks) == shown([text]) == shown(list(text))


@given(text=TEXTS, seed=st.integers(0, 2**32), tools=st.booleans())
def test_every_token_is_carried_once_and_in_order(text: str, seed: int, tools: bool) -> None:
    tokens = (*ids(text), EOS)
    made = processor("EE", tools=tools)
    deltas = run(made, cut(tokens, seed))
    carried = [token for delta in deltas for token in delta.tokens]
    assert [token.token_id for token in carried] == list(tokens[: made.completion_tokens])


@given(text=TEXTS, seed=st.integers(0, 2**32))
def test_a_stream_cut_after_any_piece_can_be_continued(text: str, seed: int) -> None:
    """The tokens up to a delta's last id decode to no more than the text shown so far."""
    tokens = (*ids(text), EOS)
    shown, num_carried = "", 0
    for delta in run(processor("EE", tools=True), cut(tokens, seed))[:-1]:
        shown += delta.text
        num_carried += len(delta.tokens)
        if delta.tokens:
            whole = TOKENIZER.detokenizer()
            text_of_carried = "".join(whole.push(token) for token in tokens[:num_carried])
            assert shown.startswith(text_of_carried)


def test_the_end_token_is_counted_and_not_shown() -> None:
    made = processor()
    (delta,) = run(made, [(*ids("a"), EOS)])
    assert (delta.text, made.completion_tokens) == ("a", 2)
    assert [token.is_shown for token in delta.tokens] == [True, False]


def test_half_a_character_at_the_end_is_shown_as_what_it_is() -> None:
    (delta,) = run(processor(), [ids("\u00e9")[:1]], finish="length")
    assert (delta.text, delta.finish_reason) == ("\ufffd", "length")


def test_an_answer_without_text_still_finishes() -> None:
    (delta,) = run(processor(), [(EOS,)])
    assert (delta.parts, delta.finish_reason) == ((), "stop")


def test_tokens_after_a_stop_string_do_not_count() -> None:
    made = processor("END")
    (delta,) = run(made, [ids("a END b c d")])
    assert (delta.text, made.completion_tokens) == ("a ", 5)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>\u00e9"}}\n</tool_call>'


def test_a_call_that_the_length_cuts_has_what_there_is_and_the_reason_is_length() -> None:
    text = 'Yes. <tool_call>{"name": "f", "arguments": {"a": "b'
    (delta,) = run(processor(tools=True), [ids(text)], finish="length")
    assert (delta.text, called(delta), delta.finish_reason) == ("Yes.", [("f", '{"a": "b')], "length")
    (delta,) = run(processor(tools=True, whole=True), [ids(text)], finish="length")
    assert (delta.text, called(delta), delta.finish_reason) == ("Yes.", [], "length")


@pytest.mark.parametrize("stop", ["ame", "\n</tool", '"f"', "tool_call"])
def test_a_stop_string_inside_a_call_or_its_markup_has_no_effect(stop: str) -> None:
    (delta,) = run(processor(stop, tools=True), [(*ids(f"Yes. {CALL}"), EOS)])
    assert (delta.text, called(delta)) == ("Yes.", [("f", '{"a": "</tool_call>\u00e9"}')])
    assert delta.finish_reason == "tool_calls"


def test_a_stop_string_after_a_call_ends_the_answer_that_has_called() -> None:
    (delta,) = run(processor("Do", tools=True), [ids(f"{CALL} I Do not")])
    assert (delta.text, len(delta.calls), delta.finish_reason) == ("I ", 1, "tool_calls")


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    (delta,) = run(processor("ab", tools=True), [(*ids(f"a{CALL}b"), EOS)])
    assert (delta.text, len(delta.calls), delta.finish_reason) == ("ab", 1, "tool_calls")


def test_a_call_that_the_model_itself_does_not_end_is_content() -> None:
    (delta,) = run(processor(tools=True), [(*ids('<tool_call>{"name": "f"'), EOS)])
    assert (delta.text, delta.finish_reason) == ('<tool_call>{"name": "f"', "stop")


def test_whole_calls_come_at_their_end() -> None:
    deltas = run(processor(tools=True, whole=True), [(token,) for token in (*ids(f"{CALL}{CALL}"), EOS)])
    assert [called(delta) for delta in deltas if delta.parts] == [[("f", '{"a": "</tool_call>\u00e9"}')]] * 2


def test_who_wants_one_call_gets_one() -> None:
    for groups in ([ids(f"{CALL}{CALL}")], [(token,) for token in ids(f"{CALL}{CALL}")]):
        delta = joined(run(processor(tools=True, one=True), groups))
        assert (called(delta), delta.finish_reason) == ([("f", '{"a": "</tool_call>\u00e9"}')], "tool_calls")


THOUGHT = "Hm, a stop: END.\n</think>\n\n"


def test_reasoning_is_separated_counted_and_free_of_stop_strings() -> None:
    made = processor("END", thinks=True)
    delta = joined(run(made, [(token,) for token in ids(f"\n{THOUGHT}It is. END x")]))
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("Hm, a stop: END.", "It is. ", "stop")
    assert made.reasoning_tokens == len(ids(f"\n{THOUGHT}".rstrip()))
    assert [token.token_id for token in delta.tokens] == list(ids(f"\n{THOUGHT}It is. END"))


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_outputs_that_are_cut_between_any_two_tokens_give_the_same_answer(finish: str) -> None:
    tokens = (*ids(f"Let me see \u00e9. {CALL} {CALL} Done <tool"), *((EOS,) if finish == "stop" else ()))

    def answer(groups: list[tuple[int, ...]]) -> tuple[object, ...]:
        whole = joined(run(processor(tools=True), groups, finish=finish))
        return whole.text, whole.reasoning, whole.calls, whole.tokens, whole.finish_reason

    expected = answer([tokens])
    assert answer([(token,) for token in tokens]) == expected
    for end in range(1, len(tokens)):
        assert answer([tokens[:end], tokens[end:]]) == expected


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "arguments": {"a": "', "so \n", "\u00e9", "<tool_call>\n"])
def test_the_work_for_a_token_does_not_grow_with_what_is_held_back(text: str) -> None:
    """Work is measured in executed lines, not seconds, for an open call, white space before one, and a character without an end."""

    def lines_for(num_tokens: int) -> int:
        made, count = processor(tools=True), 0

        def tracer(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal count
            count += event == "line"
            return tracer

        first = ids(text)
        token = first[-1] if text != "\u00e9" else first[0]
        made.push(TokenOutput("s", first))
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            for _ in range(num_tokens):
                made.push(TokenOutput("s", (token,)))
                made.take()
        finally:
            sys.settrace(before)
        return count

    assert lines_for(400) < 4.5 * lines_for(100)


def test_an_answer_of_tokens_that_the_library_decodes_does_not_depend_on_how_it_came() -> None:
    backend = byte_tokenizer()
    backend.decoder = None  # the library then joins tokens with spaces
    tokenizer = Tokenizer.from_json(backend.to_str(), {})
    tokens = (*ids("abcd"), EOS)

    def answer(groups: list[tuple[int, ...]]) -> Delta:
        made = OutputProcessor(raw_parser(tokenizer), stop=("c d",), hidden_token_ids=frozenset({EOS}))
        return joined(run(made, groups))

    for groups in ([tokens], [(token,) for token in tokens], [tokens[:2], tokens[2:]]):
        delta = answer(groups)
        assert (delta.text, delta.finish_reason) == ("a b ", "stop")
        assert [token.text_offset for token in delta.tokens] == [0, 1, 3, 5]


BYTES = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(256)}
PIECES = (b"a", b"\xc3", b"\xa9", b"\xe6", b"\x97", b"\xa5", b"\xf0", b"\xef", b"\xbf", b"\xbd", b"\xff")


@example(pieces=[b"\xc3", b"a", b"b"], seed=0)
@example(pieces=[b"\xe6", b"\x97", b"a"], seed=0)
@example(pieces=[b"\xef", b"\xbf", b"\xbd", b"a"], seed=0)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_a_token_behind_bytes_that_are_no_character_has_the_offset_of_its_own_text(
    pieces: list[bytes], seed: int
) -> None:
    def decoded(data: bytes) -> int:
        return len(data.decode("utf-8", errors="replace"))

    written, expected = b"".join(pieces), []
    for position in range(len(written)):
        before, after = decoded(written[:position]), decoded(written[position:])
        expected.append(before - (before + after > decoded(written)))
    tokens = tuple(BYTES[piece] for piece in pieces)
    made = OutputProcessor(raw_parser(TOKENIZER))
    answer = joined(run(made, cut(tokens, seed), finish="length"))
    assert [token.text_offset for token in answer.tokens] == expected
    reported = [TokenLogprobs(-1.0, ())] * (len(tokens) - 1)
    assert list(echoed_logprobs(tokens, reported, 0, TOKENIZER).text_offset) == expected


def test_a_stop_string_ends_the_text_where_it_begins_though_another_is_complete_later_and_begins_earlier() -> None:
    """The result is the same for one delta and for many."""
    for chunks in (["a bcd e"], list("a bcd e")):
        matcher = StopMatcher(("a bcd e", "c"))
        shown = [matcher.push(chunk) for chunk in chunks]
        first = next(position for position, (_, is_stopped) in enumerate(shown) if is_stopped)
        assert "".join(text for text, _ in shown[: first + 1]) == "a b"


def test_the_end_token_in_the_middle_of_an_output_is_text_like_any_other() -> None:
    """An engine with ignore_eos may sample it in the middle. It ends the answer only as the last token of an output with finish reason "stop"."""
    end = 7  # this token has text, and is the end token of this answer
    made = OutputProcessor(raw_parser(TOKENIZER), hidden_token_ids=frozenset({end}))
    made.push(TokenOutput("s", (end,)))
    made.push(TokenOutput("s", (end, *ids("a"), end), finish_reason="stop"))
    delta = made.take()
    assert delta is not None
    assert delta.text == TOKENIZER.decode([end]) * 2 + "a"
    assert [token.is_shown for token in delta.tokens] == [True, True, True, False]


def test_the_matcher_holds_no_more_than_a_stop_string_can_need() -> None:
    matcher = StopMatcher(("abcd",))
    assert matcher.push("xxabc") == ("xx", False)
    assert len(matcher.held) == 3
    assert matcher.push("abcx") == ("abcabcx", False)
    assert matcher.push("ab") == ("", False)
    assert matcher.finish() == "ab"


ANSWERED = st.lists(
    st.sampled_from([CALL, "<tool_call>", "</think>", " \n", "E", "a", "\u00e9", "<tool", '{"']), max_size=6
).map("".join)


@example(text="<<", stops=[], seed=0, tools=False, thinks=False, whole=False, cut_after=2, in_one=False)
@given(
    text=TEXTS | ANSWERED, stops=st.lists(st.text(alphabet="abE\u00e9", min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 2**32), tools=st.booleans(), thinks=st.booleans(), whole=st.booleans(),
    cut_after=st.integers(0, 4), in_one=st.booleans(),
)  # fmt: skip
def test_a_processor_that_knows_the_shown_text_continues_with_the_next_character(
    text: str, stops: list[str], seed: int, tools: bool, thinks: bool, whole: bool, cut_after: int, in_one: bool
) -> None:
    options = {"tools": tools, "thinks": thinks, "whole": whole}
    one = processor(*stops, **options)
    deltas = run(one, cut((*ids(text), EOS), seed))
    first, rest = deltas[:cut_after], deltas[cut_after:]
    if not rest:
        return
    pushed = tuple(token for delta in first for token in delta.new_token_ids)
    other = processor(*stops, **options)
    num_carried = other.resume(pushed)
    assert num_carried == sum(len(delta.tokens) for delta in first)
    left = (*ids(text), EOS)[len(pushed) :]
    groups = [(token,) for token in left] or [()]  # the last output may contain only the finish reason
    again = run(other, [left] if in_one else groups)
    assert joined(again).parts == joined(rest).parts
    assert again[-1].finish_reason == rest[-1].finish_reason
    carried = [(token.token_id, token.text_offset) for delta in again for token in delta.tokens]
    assert carried == [(token.token_id, token.text_offset) for delta in rest for token in delta.tokens]
    assert other.reasoning_tokens == one.reasoning_tokens


def test_a_whole_answer_is_not_continued() -> None:
    with pytest.raises(DivergedError, match="whole answer already"):
        processor("lo").resume(ids("Hello"))


def test_tokens_that_were_shown_and_are_computed_again_show_nothing_a_second_time() -> None:
    made = processor()
    made.resume(ids("ab"), again=ids("cd"))
    for token_id in ids("cd"):
        made.push(TokenOutput("s", (token_id,)))
        assert made.take() is None
    made.push(TokenOutput("s", ids("e")))
    delta = made.take()
    assert delta is not None
    assert (delta.text, delta.new_token_ids) == ("e", ids("e"))


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_answer_that_ends_before_what_was_shown_of_it_has_diverged(reason: Any) -> None:
    """This happens at a site with a shorter context."""
    made = processor()
    made.resume(ids("ab"), again=ids("cd"))
    with pytest.raises(DivergedError, match="ended where token"):
        made.push(TokenOutput("s", ids("c"), finish_reason=reason))
    made = processor()
    made.resume(ids("ab"), again=ids("cd"))
    made.push(TokenOutput("s", ids("cd"), finish_reason=reason))
    assert made.finish_reason == reason


def test_of_an_answer_that_was_shown_to_its_end_nothing_is_taken_and_all_is_counted() -> None:
    made = processor("END", thinks=True)
    made.end_with(ids("So.</think>\n\nYes END"), "stop")
    assert (made.take(), made.is_taken, made.finish_reason, made.stop_string) == (None, True, "stop", "END")
    assert (made.completion_tokens, made.reasoning_tokens) == (
        len(ids("So.</think>\n\nYes END")),
        len(ids("So.</think>")),
    )
