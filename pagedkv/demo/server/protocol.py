"""OpenAI's completions: what a body may ask for, checked, and the objects that are sent back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.demo.server.errors import bad_request

_MOST_STOPS, _LONGEST_STOP = 4, 256
_MOST = 2**31 - 1
# Known fields that are not served, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}


@dataclass(frozen=True)
class Call:
    """What a client asks for. A prompt is a text, or the ids of its tokens."""

    model: str | None
    prompts: list[str] | list[list[int]]
    max_tokens: int | None
    n: int
    temperature: float
    top_p: float
    seed: int | None
    stops: list[str]
    stream: bool
    include_usage: bool


def parse(body: bytes, vocabulary: int) -> Call:
    """Reads a request.

    Raises
    ------
    ApiError
        400 for whatever is not as it should be, with the name of the field.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request(None, "the body: expected a JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise bad_request(None, f"the body: expected a JSON object, got {_name(fields)}")
    for name, neutral in _NOT_SERVED.items():
        if fields.pop(name, None) not in neutral:
            raise bad_request(name, "is not served here: leave it out", "unsupported_parameter")
    take = _Fields(fields)
    take.text("user")
    stream = take.flag("stream")
    call = Call(
        model=take.text("model"),
        prompts=_prompts(fields.pop("prompt", None), vocabulary),
        max_tokens=take.integer("max_tokens", 1, _MOST),
        n=take.integer("n", 1, 128) or 1,
        temperature=take.number("temperature", 0, 2, default=1.0),
        top_p=take.number("top_p", 0, 1, default=1.0),
        seed=take.integer("seed", -(2**63), 2**63 - 1),
        stops=_stops(fields.pop("stop", None)),
        stream=stream,
        include_usage=_include_usage(fields.pop("stream_options", None), stream),
    )
    if fields:
        name = min(fields)
        raise bad_request(name[:100], "is no field of a completion", "unknown_parameter")
    return call


class _Fields:
    """Takes simple values out of a JSON object. One that is missing or null is the default."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def text(self, name: str) -> str | None:
        value = self._fields.pop(name, None)
        return None if value is None else _text(name, value)

    def flag(self, name: str) -> bool:
        value = self._fields.pop(name, None)
        if not isinstance(value, (bool, type(None))):
            raise bad_request(name, f"expected true or false, got {_name(value)}")
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self._fields.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise bad_request(name, f"expected an integer from {least} to {most}, got {_name(value)}")
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        value = self._fields.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise bad_request(name, f"expected a number from {least} to {most}, got {_name(value)}")
        return float(value)


def _prompts(value: Any, vocabulary: int) -> list[str] | list[list[int]]:
    """One prompt or several, as a list. Token ids are told from several prompts by what comes first."""
    if isinstance(value, str):
        return [_text("prompt", value)]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_text("prompt", item) for item in value]
        if all(isinstance(item, list) and item for item in value):
            return [_tokens(item, vocabulary) for item in value]
        if not any(isinstance(item, (str, list)) for item in value):
            return [_tokens(value, vocabulary)]
    raise bad_request("prompt", f"expected a text, token ids, or a list of either, got {_name(value)}")


def _tokens(items: Iterable[Any], vocabulary: int) -> list[int]:
    tokens = list(items)
    for item in tokens:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocabulary:
            raise bad_request("prompt", f"expected token ids from 0 to {vocabulary - 1}, got {_name(item)}")
    return tokens


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    if len(items) > _MOST_STOPS or not all(isinstance(item, str) and 0 < len(item) <= _LONGEST_STOP for item in items):
        expected = f"expected up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters"
        raise bad_request("stop", f"{expected}, got {_name(value)}")
    return [_text("stop", item) for item in items]


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise bad_request("stream_options", "is for stream: true only")
    if not isinstance(value, dict) or not set(value) <= {"include_usage"}:
        raise bad_request("stream_options", f'expected {{"include_usage": ...}}, got {_name(value)}')
    return _Fields(dict(value)).flag("include_usage")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_request(name, f"expected a text, got {_name(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_request(name, "expected a text, got one with half a surrogate pair") from None
    return value


def _name(value: Any) -> str:
    """What came, short enough for a message."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- answers ---


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def usage(n_prompt: int, n_known: int, n_generated: int) -> dict[str, Any]:
    """Counts of tokens; `n_known` of the prompt were not computed again."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_known},
    }


def event(value: Mapping[str, Any] | str) -> bytes:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
