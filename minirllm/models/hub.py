"""A model's files from the hub, and one clear sentence for everything that can keep them away.

Owns: the download into the hub library's own cache, and which files are taken. Does not know: what is done with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from minirllm.errors import ModelError
from minirllm.models.folder import first_line

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # never pickles, never code
NETWORK_ERRORS: Any = (OSError, *HfHubHTTPError.__bases__)  # the latter hold the errors of the library's HTTP client
INSTEAD = "use smollm2-135m or a local folder"


def fetch(repo: str, revision: str | None) -> Path:
    """The snapshot folder, named after the commit. What is already on disk is not fetched again. Raises ModelError."""
    at = f"{repo}@{revision}" if revision else repo
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except GatedRepoError:
        problem = f"Model {at} is gated: accept its terms on its hub page, then run `hf auth login` or set HF_TOKEN."
    except RevisionNotFoundError:
        problem = f"Model {repo} has no revision {revision!r}: use a branch, tag or commit listed on its hub page."
    except RepositoryNotFoundError:
        problem = (
            f"The hub has no model {repo!r}, or it is private: "
            "check the spelling, or set HF_TOKEN to a token that may read it."
        )
    except HFValidationError as error:
        reason = str(error).rstrip(".")
        problem = f"{repo!r} is neither a local folder nor a hub id ({reason}): {INSTEAD}, or write owner/name."
    except OfflineModeIsEnabled:
        problem = f"Model {at} is not on this machine and HF_HUB_OFFLINE is set: unset it, or {INSTEAD}."
    except NETWORK_ERRORS as error:
        problem = f"Cannot fetch model {at} from the hub ({first_line(error)}): check the network, or {INSTEAD}."
    raise ModelError(problem)
