"""The base of every section: strict, closed, and wrong values raise `ConfigError`, all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from speedtronic.config.problems import InvalidConfigError, Path, Problem, problems_of, unknown_key
from speedtronic.config.secrets import redacted_under


class AutoSize(int):
    """A size that is written `auto`: measuring finds it (`tune`). It is 1 until then."""

    def __new__(cls, value: int = 1) -> AutoSize:
        return super().__new__(cls, value)

    def __repr__(self) -> str:
        return "auto"


class Section(BaseModel):
    """A part of the configuration.

    Types are strict: nothing is coerced, except an integer where a number is expected. Unknown keys and wrong
    values raise one `ConfigError` that lists every problem, at construction and at assignment. Contradictions
    between keys are checked at construction and by `SpeedtronicConfig.validate`, not at assignment, so
    that keys which depend on each other can be edited one after the other.

    A key may follow another one: without a value of its own it takes the value of the other (`data.seed` that of
    `run.seed`). `following` names these keys, and `resolve` sets them.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        validate_assignment=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    section_name: ClassVar[str] = ""
    following: ClassVar[tuple[str, ...]] = ()
    known_keys: ClassVar[dict[str, list[str]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        Section.known_keys[cls.section_name] = list(cls.model_fields)

    def __init__(self, /, **values: Any) -> None:
        problems: list[Problem] = []
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = problems_of(error, self.path(), self.known_keys)
        # Contradictions are looked for among the sound values, so that one mistake is reported once.
        wrong = {problem.path[len(self.path())] for problem in problems}
        sound = {key: value for key, value in (self.defaults() | values).items() if key not in wrong}
        problems += [Problem(self.path(key), message) for key, message in self.contradictions(sound)]
        if problems:
            raise InvalidConfigError(problems)
        self.resolve()

    @classmethod
    def path(cls, *keys: str) -> Path:
        """The full path of this section, or of a key in it."""
        return (cls.section_name, *keys) if cls.section_name else keys

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of each key, before the keys that follow others are resolved."""
        return {key: field.get_default(call_default_factory=True) for key, field in cls.model_fields.items()}

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Keys whose values exclude each other, with a message. `values` has only the keys that are right."""
        return iter(())

    def resolve(self) -> None:
        """Set the keys that follow others of this section, unless they were given."""

    def follow(self, key: str, value: object) -> None:
        """Set `key` to `value` unless it was given. It still counts as not given afterwards."""
        if self.follows(key):
            # Not by pydantic's own assignment, which would count the key as given from now on.
            self.__dict__[key] = value
            self.model_fields_set.discard(key)

    def follows(self, key: str) -> bool:
        """Whether `key` has no value of its own: it was not given, or was given as null."""
        return key not in self.model_fields_set or self.__dict__[key] is None

    if not TYPE_CHECKING:  # A type checker that sees this method would allow any attribute to be set.

        def __setattr__(self, key: str, value: Any) -> None:
            if key not in type(self).model_fields:
                raise InvalidConfigError([unknown_key(self.path(key), self.known_keys)])
            try:
                super().__setattr__(key, value)
            except ValidationError as error:
                raise InvalidConfigError(problems_of(error, self.path(), self.known_keys)) from None
            self.resolve()

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for key, value in super().__repr_args__():
            yield key, redacted_under(key or "", value)

    def plain(self) -> dict[str, Any]:
        """The values as dicts, lists, strings, numbers, bools and None. Secrets are in it as plain text."""
        return {key: _plain(value) for key, value in self}

    def given(self) -> dict[str, Any]:
        """The plain values that were given or changed: all but defaults and keys that follow others."""
        defaults = self.defaults()
        # pydantic knows which keys were set, but not that a list or mapping was changed in place. So a value that is
        # not the default counts as given too, unless it may come from another key.
        return {
            key: value.given() if isinstance(value, Section) else _plain(value)
            for key, value in self
            if not self.follows(key) or (key not in self.following and value != defaults[key])
        }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):  # a section, or an item of one
        return {key: _plain(item) for key, item in value}
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, AutoSize):
        return repr(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
