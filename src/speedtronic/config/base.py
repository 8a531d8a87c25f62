"""The base of every section: strict, closed, and wrong values raise `ConfigError`, all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from speedtronic.config.problems import InvalidConfigError, Path, Problem, problems_of, unknown_key
from speedtronic.config.secrets import redacted_under


class Section(BaseModel):
    """A part of the configuration.

    Types are strict: nothing is coerced but an integer where a number is wanted. Unknown keys and wrong
    values raise one `ConfigError` that lists every problem, at construction and at assignment. Contradictions
    between keys are looked for at construction and by `SpeedtronicConfig.validate`, not at assignment, so
    that keys which depend on each other can be edited one after the other.
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
        """The default of each key, before what follows other keys is resolved."""
        return {key: field.get_default(call_default_factory=True) for key, field in cls.model_fields.items()}

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Keys whose values exclude each other, with a message; `values` lacks the keys that are wrong."""
        return iter(())

    def resolve(self) -> None:
        """Give the keys that follow others of this section their values, unless they were given."""

    def follow(self, key: str, value: object) -> None:
        """Set `key` to `value` unless a value of its own was given; it stays a key that was not given."""
        if self.follows(key):
            # Past pydantic's own assignment, which would count the key as given from now on.
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
        """The values as dicts, lists, strings, numbers, bools and None. Secrets are in it, in the clear."""
        return {key: _plain(value) for key, value in self}

    def given(self) -> dict[str, Any]:
        """The plain values that were given or changed: all but defaults and what follows other keys."""
        defaults = self.defaults()
        return {
            key: value.given() if isinstance(value, Section) else _plain(value)
            for key, value in self
            if self._is_given(key, value, defaults[key])
        }

    def _is_given(self, key: str, value: Any, default: Any) -> bool:
        # A list or mapping that was changed in place does not count as set.
        return not self.follows(key) or (key not in self.following and value != default)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.plain()
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
