"""The options of a template: what each accepts, and the value that a text means."""

import re
from dataclasses import dataclass

from ..errors import UsageError
from ..naming.names import did_you_mean
from ..project.layer import Value

_JINJA_OR_CONTROL = re.compile(r"\{[{%#]|[\x00-\x1f\x7f]")
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True)
class Option:
    """An option of a template.

    Attributes:
        name: Its key in `cookiecutter.json`.
        default: Its value unless set.
        choices: The values that it may take; empty where any value of the default's type
            will do.
        help: One line for `torchshard templates show`.
    """

    name: str
    default: Value
    choices: tuple[Value, ...] = ()
    help: str = ""

    @property
    def kind(self) -> str:
        """What it accepts, in words."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        return type(self.default).__name__

    @property
    def listed(self) -> tuple[Value, ...]:
        """Every value that it may take, the default first; empty if they are too many."""
        if isinstance(self.default, bool):
            return (self.default, not self.default)
        return self.choices

    def named_in(self, class_name: str) -> Value:
        """The choice that stands in a class's name, as `auto` finds it; else the default."""
        found = [one for one in self.choices if str(one) in class_name.lower()]
        return found[0] if found else self.default

    def parse(self, text: str) -> Value:
        """The value that `text` means.

        Raises:
            UsageError: If it means none.
        """
        if self.choices:
            return self._choice(text)
        if isinstance(self.default, bool):
            return self._boolean(text)
        if isinstance(self.default, str):
            return self._text(text)
        try:
            return type(self.default)(text)
        except ValueError:
            raise UsageError(f"{self.name}={text} is not {self._article()}") from None

    def _choice(self, text: str) -> Value:
        by_text = {str(choice): choice for choice in self.choices}
        if text not in by_text:
            raise UsageError(
                f"{self.name}={text} is not one of {', '.join(by_text)}."
                f"{did_you_mean(text, by_text)}"
            )
        return by_text[text]

    def _boolean(self, text: str) -> bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{self.name}={text} is neither true nor false")
        return _BOOLEANS[text.lower()]

    def _text(self, text: str) -> str:
        if _JINJA_OR_CONTROL.search(text):
            raise UsageError(
                f"{self.name}={text!r} holds a control character or a template tag; "
                "plain text is expected"
            )
        return text

    def _article(self) -> str:
        return "an integer" if isinstance(self.default, int) else "a number"


def value_text(value: Value) -> str:
    """`value` as one types it after `--set key=`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
