"""``~/.minirllm/config.toml``: providers, their models and keys, as `minirllm model` stores them.

Owns: the file, that only its user may read it, and how a key is shown. Does not know: who the providers are, HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirllm.errors import ConfigError, UserError
from minirllm.files import sync, why

HEADER = "# Written by `minirllm model`. It may hold keys: only its owner may read it.\n"
SHOWN = 4  # characters of a key that are shown, of at least four times as many


@dataclass(frozen=True)
class Profile:
    """One stored provider. `key` or `key_env`, the variable that holds it, is empty; both are where none is needed."""

    name: str
    provider: str  # its name in the table, or empty
    base_url: str
    model: str
    key: str = field(default="", repr=False)
    key_env: str = ""

    def key_shown(self) -> str:
        """Where the key is from; never the key."""
        return f"key {masked(self.key)}" if self.key else f"key from ${self.key_env}" if self.key_env else "no key"


@dataclass
class Stored:
    """All that the file says."""

    active: str = ""
    profiles: dict[str, Profile] = field(default_factory=dict)


def path() -> Path:
    """Where the file is."""
    return Path.home() / ".minirllm" / "config.toml"


def masked(key: str) -> str:
    """A key as it may be shown: its last characters, if there are many more."""
    return f"...{key[-SHOWN:]}" if len(key) >= 4 * SHOWN else "..."


def checked_key(key: str) -> str:
    """A key that can stand in a header. Raises ConfigError, which does not repeat it."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("The key holds blanks or letters that no key has: copy it again, alone on its line.")
    return key


def load() -> Stored:
    """What is stored. Raises ConfigError when it cannot be read, or when others can read it, too."""
    file = path()
    try:
        with file.open("rb") as opened:
            _private(file, os.fstat(opened.fileno()))
            values = tomllib.load(opened)
    except FileNotFoundError:
        return Stored()
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {why(error)}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not valid TOML: {_place(error)}. Mend it, or delete it and set up again."
        ) from None
    return _parse(file, values)


def _private(file: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{file} belongs to another user: it is not used.")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        what = "read or change" if mode & 0o044 else "change"
        help = f"run `chmod 600 {file}`, and replace keys in it that may be known"
        raise ConfigError(f"Other users may {what} {file}: {help}.")


def _place(error: Exception) -> str:
    """Where it broke. The parser's own words could repeat a part of a key."""
    said = str(error)
    return said[said.rindex("(at ") + 1 : -1] if "(at " in said else "it is not UTF-8 text"


def _parse(file: Path, values: Mapping[str, Any]) -> Stored:
    texts = {f.name for f in dataclasses.fields(Profile)} - {"name"}
    stored = Stored()
    try:
        for name, entry in values.get("profiles", {}).items():
            if wrong := sorted(set(entry) - texts):
                raise ConfigError(f"{file} has an unknown key {wrong[0]!r} in the profile {name!r}: take it out.")
            if not all(isinstance(value, str) for value in entry.values()):
                raise TypeError
            fill = dict.fromkeys(texts, "")
            stored.profiles[name] = Profile(name, **{**fill, **entry})
        active = values.get("active", "")
        stored.active = active if active in stored.profiles else ""
    except (AttributeError, TypeError):
        raise ConfigError(f"{file} is not what `minirllm model` writes: delete it and set up again.") from None
    return stored


@contextlib.contextmanager
def changing() -> Iterator[Stored]:
    """What is stored, to be changed: saved at the end, and not changed by another process meanwhile."""
    file = path()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(file.parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"Cannot write {file}: {why(error)}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = load()
        yield stored
        save(stored)
    finally:
        os.close(lock)


def save(stored: Stored) -> None:
    """Replace the file: whole, for its user's eyes only. Raises UserError when it cannot be written."""
    lines = [HEADER, f"active = {_text(stored.active)}\n"]
    for profile in stored.profiles.values():
        lines.append(f"\n[profiles.{_text(profile.name)}]\n")
        entry = {name: value for name, value in dataclasses.asdict(profile).items() if name != "name" and value}
        lines += [f"{name} = {_text(value)}\n" for name, value in entry.items()]
    file, partial, text = path(), "", "".join(lines)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError("A name, model or URL has bytes that are no text: write it in UTF-8.")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = file.resolve()  # a link to it stays one
        descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=".config-")  # made with mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(descriptor)
        Path(partial).replace(file)
        sync(file.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(partial).unlink(missing_ok=True)
        raise UserError(f"Cannot write {file}: {why(error)}.") from None


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON is TOML here, but for DEL
