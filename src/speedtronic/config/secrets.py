"""Which values are secret, and what stands in their place wherever a configuration is shown or written."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_ALWAYS_SECRET = {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"}
_SECRET_AT_THE_END = ("token", "key", *_ALWAYS_SECRET)


def is_secret(key: str) -> bool:
    """Whether a key names a secret: `secret_access_key`, `apiKey`, `token`; not `num_tokens`, `key_dim`."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return bool(words) and (words[-1].endswith(_SECRET_AT_THE_END) or not _ALWAYS_SECRET.isdisjoint(words))


def redacted(value: Any) -> Any:
    """A copy of a tree of plain values in which each value under a secret-looking key is `<redacted>`."""
    if isinstance(value, dict):
        return {key: _hidden(item) if is_secret(key) else redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return value


def _hidden(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else REDACTED


def without_redacted(value: Any) -> Any:
    """A copy of a tree of plain values in which `<redacted>` has become null: the secret is not known."""
    if isinstance(value, dict):
        return {key: without_redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_redacted(item) for item in value]
    return None if value == REDACTED else value
