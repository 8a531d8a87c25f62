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
# Models have tokens and keys too: `pad_token` is text, `sort_key` a name. The word before says which ones grant access.
_TOKEN_OR_KEY = re.compile(r"(token|key)s?$")
_GRANTS_ACCESS = {
    *("", "access", "account", "admin", "api", "app", "auth", "bearer", "bot", "client", "deploy", "encryption", "id"),
    *("identity", "jwt", "license", "login", "master", "oauth", "private", "read", "refresh", "repo", "sas", "secret"),
    *("security", "service", "session", "shared", "signing", "ssh", "sso", "storage", "upload", "user", "webhook"),
    *("write", "aws", "azure", "gcp", "gcs", "github", "gitlab", "hf", "hub", "huggingface", "openai", "s3", "wandb"),
}
# What a token or key of a service looks like: a known beginning, or many letters and digits in one word.
_CREDENTIAL = re.compile(
    r"(hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|eyJ)[\w.=-]{8,}"
    r"|(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[A-Za-z0-9+/]{32,}={0,2}"
)

# A store may need any option at all. Only these are known to hold no secret, so all others are hidden.
_OPTIONS_OF_A_STORE = {"store_options", "mirror_options"}
_HARMLESS_OPTIONS = {
    *("endpoint", "endpoint_url", "region", "profile", "account", "use_ssl", "anon", "addressing_style", "checksum"),
    *("part_size", "commits_an_hour"),
}
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")


def is_secret(key: str) -> bool:
    """Whether a key names a secret: `secret_access_key`, `apiKey`, `tokens`; not `pad_token` or `num_tokens`."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return bool(words) and (
        words[-1].endswith(tuple(_ALWAYS_SECRET)) or not _ALWAYS_SECRET.isdisjoint(words) or _grants_access(words)
    )


def _grants_access(words: list[str]) -> bool:
    """Whether words that end in a token or a key name one of a service: `api_key`, `apikey`, `key`."""
    before, found = _TOKEN_OR_KEY.subn("", words[-1])
    return bool(found) and (before or "".join(words[-2:-1])) in _GRANTS_ACCESS


def may_be_shown(path: tuple[str | int, ...]) -> bool:
    """Whether an error about the value at a path of the configuration may repeat that value."""
    if path[0] == "distributed":
        return len(path) == 2 and path[1] not in {"token", "repo_id", "worker_repo_id", *_OPTIONS_OF_A_STORE}
    if path[0] == "checkpoint":
        return len(path) == 2 and path[1] not in {"mirror", *_OPTIONS_OF_A_STORE}
    # A key such as `my_token` may hold a secret. An error can do without its value, a configuration cannot.
    key = str(path[-1])
    return not is_secret(key) and _TOKEN_OR_KEY.search(key.lower()) is None


def redacted(value: Any) -> Any:
    """A copy of a tree of plain values without its secrets.

    `<redacted>` replaces each value under a key that names a secret, each credential under any other key of a token,
    and each option of a store that is not known to be harmless. The user and password are removed from addresses.
    """
    if isinstance(value, dict):
        return {key: redacted_under(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return _USERINFO.sub("", value) if isinstance(value, str) else value


def redacted_under(key: str, value: Any) -> Any:
    """What `redacted` makes of a value under a key."""
    if key in _OPTIONS_OF_A_STORE and isinstance(value, dict):
        return {name: _redacted_option(name, item) for name, item in value.items()}
    if is_secret(key):
        return _hidden(value)
    return _without_credentials(redacted(value)) if _TOKEN_OR_KEY.search(key.lower()) else redacted(value)


def _without_credentials(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return REDACTED if isinstance(value, str) and _CREDENTIAL.fullmatch(value.strip()) else value


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
