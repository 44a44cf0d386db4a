"""``minirllm model setup | show | swap``: what is stored of providers, changed and shown.

Owns: what is asked, what the answers may be, the lines of `show`. Does not know: where they are typed, the file's form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from minirllm.config import nearest
from minirllm.errors import ConfigError, UserError
from minirllm.providers import ACTIVE, KNOWN, checked_url, profiles
from minirllm.providers.profiles import Profile

Ask = Callable[[str, str, bool], str]  # (question, what an empty answer means, is the answer a secret?)


def setup(given: Mapping[str, str], ask: Ask | None) -> str:
    """Store a provider and make it the active one. `given` are the options: provider, base_url, model, key, key_env,
    name. What is missing is asked for; without anyone to `ask` it is an error. Returns what to tell the user."""
    profiles.load()  # a file that is broken is said before anything is asked
    provider = given.get("provider") or ("" if given.get("base_url") else _ask(ask, "Provider", "provider", "openai"))
    if provider and not re.fullmatch(r"[\w.-]{1,60}", provider):
        raise ConfigError("A provider's name is made of letters, digits, dots, dashes and underscores.")
    known = KNOWN.get(provider)
    url = given.get("base_url") or (known.base_url if known else "")
    if not url and ask is None:
        others = f"use {', '.join(KNOWN)}, or give --base-url, too"
        raise ConfigError(f"There is no provider {provider!r} in the table{nearest(provider, list(KNOWN))}: {others}.")
    url = checked_url(url or _ask(ask, "Base URL", "base-url", ""))
    named = next((name for name, one in KNOWN.items() if one.base_url == url), "")
    name = given.get("name") or provider or named or re.sub(r"[^\w.-]+", "-", url.partition("//")[2])
    if name == ACTIVE or not re.fullmatch(r"[\w.-]{1,60}", name):
        raise ConfigError(
            "A profile's name is made of letters, digits, dots, dashes and underscores, and not 'active'."
        )
    model = (given.get("model") or _ask(ask, "Model", "model", "")).strip()
    key, key_env = _key(given, ask, KNOWN[named].key_env if named else "", bool(named))
    profile = Profile(name, named, url, model, key, key_env)
    with profiles.changing() as stored:
        stored.profiles[name], stored.active = profile, name
    return f"Stored in {profiles.path()}:\n{line(profile, True)}\nUse it: --provider {ACTIVE}, or {name}."


def _ask(ask: Ask | None, question: str, option: str, default: str, secret: bool = False) -> str:
    if ask is None:
        raise UserError(f"{question}? Give --{option}: there is no terminal to ask at.")
    return ask(question, default, secret)


def _key(given: Mapping[str, str], ask: Ask | None, usual: str, known: bool) -> tuple[str, str]:
    """(key, variable that holds it): one of them, or none where none is needed."""
    if given.get("key") and given.get("key_env"):
        raise UserError("Give --key or --key-env, not both.")
    if variable := given.get("key_env", ""):
        if not re.fullmatch(r"[A-Za-z_]\w*", variable):
            raise ConfigError("--key-env takes the name of an environment variable, not a key.")
        return "", variable
    if "key" in given:
        key = profiles.checked_key(given["key"])
        if not key:
            raise ConfigError("The key is empty: write it to standard input, alone on its line.")
        return key, ""
    if usual and os.environ.get(usual):
        return "", usual
    if ask is None:
        if usual:
            raise UserError(f"Key? Give --key-env NAME, or --key - and write it to standard input; {usual} is not set.")
        return "", ""
    if known and not usual:
        return "", ""
    key = profiles.checked_key(ask("Key (not shown; empty: none)", "", True))
    return key, ""


def show() -> str:
    """What is stored. A key is shown by its last characters only."""
    stored = profiles.load()
    if not stored.profiles:
        return f"No provider is stored. `minirllm model setup` stores one; known are {', '.join(KNOWN)}."
    lines = [line(profile, profile.name == stored.active) for profile in stored.profiles.values()]
    return "\n".join([f"{profiles.path()}:", *lines])


def line(profile: Profile, active: bool) -> str:
    """One profile, for people."""
    return f"{'*' if active else ' '} {profile.name}: {profile.model} at {profile.base_url}, {profile.key_shown()}"


def swap(name: str, model: str) -> str:
    """Make the profile `name` the active one (empty: leave it), and `model` its model (empty: leave it)."""
    with profiles.changing() as stored:
        name = name or stored.active
        if name not in stored.profiles:
            names = list(stored.profiles)
            have = f"there are {', '.join(names)}" if names else "there are none"
            raise ConfigError(
                f"There is no profile {name!r}{nearest(name, names)}: {have}; `minirllm model setup` makes one."
            )
        stored.active = name
        stored.profiles[name] = replace(stored.profiles[name], model=model or stored.profiles[name].model)
    return line(stored.profiles[name], True)
