"""The plain values of a file that is not trusted: numbers, texts, names and objects, each refused unless it is what it should be.

Names of nodes, inputs, weights and arguments are written into Python code that PyTorch compiles: they are identifiers.
"""

import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from equipoise.core.errors import InputError, Refused

NAME = re.compile(r"^[A-Za-z_]\w{0,199}$", re.ASCII)
_PART = re.compile(r"^[A-Za-z0-9_][\w-]{0,199}$", re.ASCII)
INT64 = 2**63
Check = Callable[[Any], Any]


class Plain:
    """The checks of one file; `name` is what its messages call it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, what: str, value: Any) -> InputError:
        """What is wrong, and with which value."""
        return InputError(f"{self.name} has {what}: {str(value)[:80]!r}; export it again")

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        """An object."""
        if not isinstance(value, dict):
            raise self.wrong(f"no {what}", value)
        return value

    def items(self, value: Any, what: str) -> list[Any]:
        """A list."""
        if not isinstance(value, list):
            raise self.wrong(f"no list of {what}", value)
        return value

    def integer(self, value: Any) -> int:
        """A whole number of 64 bits."""
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > INT64:
            raise self.wrong("no whole number where one belongs", value)
        return value

    def boolean(self, value: Any) -> bool:
        """True or false."""
        if not isinstance(value, bool):
            raise self.wrong("neither true nor false where one belongs", value)
        return value

    def number(self, value: Any) -> Any:
        """A number, or the name of one that JSON cannot write."""
        if value in ("Infinity", "-Infinity", "NaN") or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            return value
        raise self.wrong("no number where one belongs", value)

    def text(self, value: Any) -> str:
        """A short, printable text."""
        if not isinstance(value, str) or len(value) > 500 or not value.isprintable():
            raise self.wrong("a strange text as an argument", value)
        return value

    def identifier(self, value: Any) -> str:
        """A name that may stand in code."""
        if not (isinstance(value, str) and NAME.match(value)) or keyword.iskeyword(value) or value in ("self", "torch"):
            raise Refused(f"{self.name} calls something {str(value)[:80]!r}, which is no name: names become code")
        return value

    def path(self, value: Any) -> str:
        """Names joined by dots."""
        parts = value.split(".") if isinstance(value, str) else [""]
        if not all(_PART.match(p) and not (p.startswith("__") and p.endswith("__")) for p in parts):
            raise Refused(f"{self.name} calls a weight {str(value)[:80]!r}, which is no name: names become code")
        return str(value)

    def only(self, document: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
        """Refuse fields that are not known and say something."""
        for key, value in document.items():
            if key == "use_pickle" and value is not False:
                raise self.pickled()
            if key not in known and value not in (None, {}, [], "", False):
                raise Refused(
                    f"{self.name} has {str(key)[:60]!r} in its {what}, which is not understood; export it again"
                )

    def pickled(self) -> Refused:
        """Refusal of pickled objects."""
        return Refused(
            f"{self.name} asks for an object to be unpickled without restriction; export it with tensor constants only"
        )

    def one_of(self, value: Any, checks: Mapping[str, Check], what: str) -> dict[str, Any]:
        """A tagged union: one known key with its value."""
        document = self.mapping(value, what)
        given = [key for key in document if document[key] is not None]
        if "expr_str" in document or given == ["as_expr"]:
            raise self.symbolic()
        if len(given) != 1 or given[0] not in checks:
            raise Refused(
                f"{self.name} has {', '.join(map(str, given))[:80]!r} as {what}, which is not a plain tensor program"
            )
        return {given[0]: checks[given[0]](document[given[0]])}

    def symbolic(self) -> Refused:
        """Refusal of symbolic shapes."""
        return Refused(
            f"{self.name} has symbolic shapes, whose expressions are evaluated as code; export it with static shapes"
        )

    def many(self, check: Check) -> Check:
        """A check of a list, item by item."""
        return lambda value: [check(v) for v in self.items(value, "arguments")]

    def fields(self, **checks: Check) -> Check:
        """A check of an object that has just these fields."""

        def check(value: Any) -> dict[str, Any]:
            document = self.mapping(value, "signature")
            self.only(document, tuple(checks), "signature")
            return {key: one(document.get(key)) for key, one in checks.items()}

        return check
