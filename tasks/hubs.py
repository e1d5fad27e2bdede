"""Hugging Face hub and ModelScope: what is cached, which files a repository has, and getting them.

Each hub's own client is used, so that its environment variables hold: for Hugging Face HF_HOME, HF_HUB_CACHE,
HF_ENDPOINT (a mirror), HF_HUB_OFFLINE and HF_TOKEN; for ModelScope MODELSCOPE_CACHE, MODELSCOPE_ENDPOINT (or the older
MODELSCOPE_DOMAIN) and MODELSCOPE_API_TOKEN. Clients are imported only where a location asks for them.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from schemas.errors import InputError

Problem = Literal["network", "unknown", "revision", "gated"]


class HubError(Exception):
    """Why a hub did not give what it was asked for.

    Args:
        problem: the kind.
        text: the client's own words, one line.
    """

    def __init__(self, problem: Problem, text: object) -> None:
        self.problem: Problem = problem
        self.text = next(iter(str(text).strip().splitlines()), "") or type(text).__name__
        super().__init__(self.text)


class Hub(Protocol):
    """What is asked of a hub; repositories are named owner/name.

    Attributes:
        title: its name, for people.
        revision: the revision that is meant where none is named.
        mirror: the environment variable that names another server.
    """

    title: str
    revision: str
    mirror: str

    def cached(self, name: str, revision: str) -> Path | None:
        """The folder of a snapshot in the cache, which may lack files; looked up without network."""

    def files(self, name: str, revision: str) -> list[str]:
        """Names of all files of a repository; raises HubError."""

    def fetch(self, name: str, revision: str, files: Sequence[str]) -> Path:
        """Get some files into the cache; gives the snapshot's folder; raises HubError."""


class HuggingFace:
    """The Hugging Face hub, by huggingface_hub."""

    title = "the Hugging Face hub"
    revision = "main"
    mirror = "HF_ENDPOINT"

    def cached(self, name: str, revision: str) -> Path | None:
        """See `Hub`."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            return None
        except OSError:  # the revision is no name of one: a folder among the cache's own names (`pr` of `pr/1`, `..`)
            return None

    def files(self, name: str, revision: str) -> list[str]:
        """See `Hub`."""
        from huggingface_hub import HfApi

        try:
            return HfApi().list_repo_files(name, revision=revision)
        except Exception as error:
            raise self._explain(error) from error

    def fetch(self, name: str, revision: str, files: Sequence[str]) -> Path:
        """See `Hub`."""
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        import requests
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return HubError("gated", error)
        if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            return HubError("unknown", error)
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError("revision", error)
        # no answer, a server's fault, or offline mode, whose errors are among these
        if isinstance(error, (requests.RequestException, ConnectionError, errors.LocalEntryNotFoundError)):
            return HubError("network", error)
        return error


class ModelScope:
    """ModelScope, by modelscope_hub (the extra `modelscope`)."""

    title = "ModelScope"
    revision = "master"
    mirror = "MODELSCOPE_ENDPOINT"

    def cached(self, name: str, revision: str) -> Path | None:
        """See `Hub`; None as well where the client is not installed, so that planning needs none."""
        if importlib.util.find_spec("modelscope_hub") is None:
            return None
        from modelscope_hub.errors import CacheNotFound

        try:
            return Path(self._api().download_repo(name, "model", revision=revision, local_files_only=True))
        except CacheNotFound:
            return None

    def files(self, name: str, revision: str) -> list[str]:
        """See `Hub`."""
        api = self._api()
        try:
            return [file.path for file in api.list_repo_files(name, "model", revision=revision, recursive=True)]
        except Exception as error:
            raise self._explain(error) from error

    def fetch(self, name: str, revision: str, files: Sequence[str]) -> Path:
        """See `Hub`."""
        api = self._api()
        try:
            return Path(api.download_repo(name, "model", revision=revision, allow_patterns=list(files)))
        except Exception as error:
            raise self._explain(error) from error

    def _api(self) -> Any:
        if importlib.util.find_spec("modelscope_hub") is None:
            raise InputError("model.hub_package", package="modelscope-hub", title=self.title)
        from modelscope_hub import HubApi

        return HubApi()

    def _explain(self, error: Exception) -> Exception:
        from modelscope_hub import errors

        if isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
            return HubError("gated", error)
        if isinstance(error, (errors.NotExistError, errors.InvalidParameter)):
            return HubError("unknown", error)
        if isinstance(error, (errors.HubError, OSError)):  # the rest: no answer, a server's fault, a torn download
            return HubError("network", error)
        return error


HUBS: dict[str, Hub] = {"hf": HuggingFace(), "ms": ModelScope()}
