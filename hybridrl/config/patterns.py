"""Regular expressions that settings hold."""

import re

from hybridrl.config.errors import ConfigError


def compiled(key: str, pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """The expression `pattern`, which is the value of `key`; raises ConfigError if it is none."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(key, pattern, f"a regular expression ({error})") from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the pattern's last match in `text` (all of it without groups), or None."""
    match = None
    for match in pattern.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return None if match is None else match.group(min(1, pattern.groups))
