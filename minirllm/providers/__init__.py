"""Outside providers: models that answer elsewhere, over OpenAI's Chat Completions, for evaluation and `serve`.

Owns: `KNOWN`, `Provider`, and which one a Config means. Any base URL works; one line in `KNOWN` gives it a name. Does
not know: HTTP, sessions.

A provider's key stays in this process: it is sent to that provider's URL and nowhere else, never shown whole, and taken
out of the environment as soon as it is known, so that nothing started from here (agents, graders) inherits it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from minirllm.config import Config, nearest
from minirllm.errors import ConfigError
from minirllm.providers import profiles
from minirllm.providers.profiles import Profile

ANY_KEY = "MINIRLLM_API_KEY"  # the variable for a provider that is not in the table
ACTIVE = "active"  # names the stored provider in use


@dataclass(frozen=True)
class Known:
    """One line of the table. `renamed`: fields that it calls otherwise; `key_env` is empty where none is needed."""

    base_url: str
    key_env: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)


KNOWN: dict[str, Known] = {
    "openai": Known("https://api.openai.com/v1", "OPENAI_API_KEY", {"max_tokens": "max_completion_tokens"}),
    "anthropic": Known("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "gemini": Known("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "openrouter": Known("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together": Known("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "fireworks": Known("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "groq": Known("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "deepseek": Known("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "mistral": Known("https://api.mistral.ai/v1", "MISTRAL_API_KEY", {"seed": "random_seed"}),
    "xai": Known("https://api.x.ai/v1", "XAI_API_KEY"),
    "vllm": Known("http://localhost:8000/v1"),
    "ollama": Known("http://localhost:11434/v1"),
    "lmstudio": Known("http://localhost:1234/v1"),
}


@dataclass(frozen=True)
class Provider:
    """Who answers: a base URL, the model there, and the key to it."""

    name: str
    base_url: str  # without a slash at the end
    model: str
    key: str = field(default="", repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict)


_taken: dict[str, str] = {}  # keys that were in the environment, by variable


def find(config: Config) -> Provider:
    """The provider that ``config.provider`` and ``config.base_url`` name, with its key: that of ``config.key_env``,
    else the stored one, else that of the variable which `KNOWN` names for it. Raises ConfigError."""
    profile = _profile(config)
    known = KNOWN.get(profile.provider, Known(profile.base_url))
    if not profile.model:
        raise ConfigError(f"Which model of {profile.name}? Name it with --model, as the provider does.")
    key = _key(config.key_env or profile.key_env, required=True) if config.key_env or not profile.key else profile.key
    key = key or _key(known.key_env or ANY_KEY)
    if known.key_env and not key:
        how = f"set {known.key_env}, name another variable with --key-env, or store one by `minirllm model setup`"
        raise ConfigError(f"There is no key for {profile.name}: {how}.")
    for name in [name for name, value in os.environ.items() if key and value.strip() == key]:
        _taken[name] = os.environ.pop(name)
    return Provider(profile.name, profile.base_url, profile.model, profiles.checked_key(key), known.renamed)


def _profile(config: Config) -> Profile:
    """What is stored of the provider, or what the table and the options say. A stored key is for its own URL only."""
    stored = profiles.load()
    wanted, url = config.provider, checked_url(config.base_url) if config.base_url else ""
    if wanted == ACTIVE and not (wanted := stored.active):
        raise ConfigError("No provider is stored: `minirllm model setup` stores one, or name one with --base-url.")
    if wanted in stored.profiles and url in ("", stored.profiles[wanted].base_url):
        found = stored.profiles[wanted]
    elif url:
        mine = next((one for one in stored.profiles.values() if one.base_url == url and not wanted), None)
        named = next((name for name, known in KNOWN.items() if known.base_url == url), "")
        found = mine or Profile(wanted or named or urlsplit(url).netloc, named, url, "")
    elif wanted in KNOWN:
        found = Profile(wanted, wanted, KNOWN[wanted].base_url, "")
    else:
        names = [*stored.profiles, *KNOWN]
        others = f"use {', '.join(names)}, or any other by --base-url"
        raise ConfigError(f"There is no provider {wanted!r}{nearest(wanted, names)}: {others}.")
    return Profile(found.name, found.provider, found.base_url, config.model or found.model, found.key, found.key_env)


def _key(variable: str, required: bool = False) -> str:
    """The key in an environment variable, or what it was before it was taken out."""
    key = (os.environ.get(variable) or _taken.get(variable, "")).strip()
    if variable and required and not key:
        raise ConfigError(f"The environment variable {variable} holds no key: set it, or name another by key_env.")
    return key


def checked_url(url: str) -> str:
    """A base URL as it is used. Raises ConfigError; it never repeats a password."""
    url = url.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
        fine = fine and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        raise ConfigError("The base URL cannot be read: give one such as https://api.example.com/v1.") from None
    if "@" in parts.netloc:
        raise ConfigError("A base URL holds no user or password: give the key by --key-env or `minirllm model setup`.")
    if not fine:
        raise ConfigError(f"A base URL is like https://api.example.com/v1, got {url!r}.")
    return url.removesuffix("/chat/completions")
