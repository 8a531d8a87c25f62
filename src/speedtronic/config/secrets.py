"""Which values are secret, and what replaces them wherever a configuration is shown or written."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_ALWAYS_SECRET = {
    *("secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase"),
    *("credential", "credentials", "creds", "auth", "authorization", "bearer", "cookie", "cookies"),
}
_SECRET_AT_THE_END = ("token", "key", *_ALWAYS_SECRET)
# Plurals need a word before them that says so: `num_tokens` is a count and `special_tokens` are text.
_SECRET_PLURAL = re.compile(r"(^|api|access|account|auth|bearer|private|refresh|secret|session|sas)(tokens|keys)$")

# A store may need any option at all. Only these are known to hold no secret, so all others are hidden.
_OPTIONS_OF_A_STORE = "store_options"
_HARMLESS_OPTIONS = {
    *("endpoint", "endpoint_url", "region", "profile", "project", "use_ssl", "anon", "addressing_style"),
}
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")


def is_secret(key: str) -> bool:
    """Whether a key names a secret: `secret_access_key`, `apiKey`, `tokens`; not `num_tokens`, `key_dim`."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return bool(words) and (
        words[-1].endswith(_SECRET_AT_THE_END)
        or not _ALWAYS_SECRET.isdisjoint(words)
        or _SECRET_PLURAL.search("".join(words[-2:])) is not None
    )


def may_be_shown(path: tuple[str | int, ...]) -> bool:
    """Whether an error about the value at a path of the configuration may repeat that value."""
    if path[0] == "distributed":
        return len(path) == 2 and path[1] not in {"token", "repo_id", "worker_repo_id", _OPTIONS_OF_A_STORE}
    return not is_secret(str(path[-1]))


def redacted(value: Any) -> Any:
    """A copy of a tree of plain values without its secrets.

    `<redacted>` replaces each value under a key that looks secret, and each option of a store that is not known to be
    harmless. The user and password are removed from addresses.
    """
    if isinstance(value, dict):
        return {key: redacted_under(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return _USERINFO.sub("", value) if isinstance(value, str) else value


def redacted_under(key: str, value: Any) -> Any:
    """What `redacted` makes of a value under a key."""
    if key == _OPTIONS_OF_A_STORE and isinstance(value, dict):
        return {name: _redacted_option(name, item) for name, item in value.items()}
    return _hidden(value) if is_secret(key) else redacted(value)


def _redacted_option(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted_option(name, item) for name, item in value.items()}
    if key not in _HARMLESS_OPTIONS or isinstance(value, list):
        return _hidden(value)
    shown = redacted(value)
    # The query of an address may hold a signature that grants access.
    return _hidden(shown) if isinstance(shown, str) and not set("@?#").isdisjoint(shown) else shown


def _hidden(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else REDACTED


def without_redacted(value: Any) -> Any:
    """A copy of a tree of plain values with null for `<redacted>`: the secret is not known."""
    if isinstance(value, dict):
        return {key: without_redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_redacted(item) for item in value]
    return None if value == REDACTED else value
