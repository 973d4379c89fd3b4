"""Files of presets, in folders and behind handles such as `hf://user/name`.

Each hub has a client of its own, with errors of its own. Here they become four: a
ConnectionError (no answer, or one that breaks off), a PermissionError (a gated or
private repository), a FileNotFoundError (no such file) and a ValueError (no such
repository).
"""

import contextlib
import functools
import importlib.util
import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import keras

from keras_moe._checks import unfit
from keras_moe._compat import hub_file, is_cached_of_storage
from keras_moe._files import read_text, regular_file

# Public buckets are also available here.
GOOGLE_STORAGE = "https://storage.googleapis.com"
# Seconds to wait for an answer.
_PATIENCE = 10
# Libraries that hubs' clients talk with; their errors have no public base class.
_TRANSPORTS = ("http", "httpx", "httpx2", "requests", "urllib", "urllib3")


def get_file(preset: str, name: str) -> str:
    """Returns the path of a preset's file, and downloads remote ones."""
    if os.path.isdir(preset):
        # KerasHub imports TensorFlow before it looks for a folder.
        path = os.path.join(preset, name)
        if not os.path.exists(path):
            raise FileNotFoundError(f"Expected {name} in the folder {preset}")
        return os.fspath(regular_file(path, preset))
    if preset.startswith("hf://"):
        return _hugging_face_file(preset, name)
    if preset.startswith("gs://") and not is_cached_of_storage(preset, name):
        if importlib.util.find_spec("tensorflow") is None:
            raise ImportError(f"Expected TensorFlow, which reads {preset}")
        check_storage(preset)
    with named_errors(preset):
        return hub_file(preset, name)


def check_file_exists(preset: str, name: str) -> bool:
    try:
        get_file(preset, name)
    except FileNotFoundError:
        return False
    return True


def load_json(preset: str, name: str = "config.json") -> dict:
    return json.loads(read_text(get_file(preset, name)))


def _hugging_face_file(preset, name):
    # `import huggingface_hub` alone does not load its submodules.
    import huggingface_hub
    from huggingface_hub import constants, errors

    repository = preset.removeprefix("hf://")
    with named_errors(preset):
        # A path, None, or a mark that the repository had no such file.
        cached = huggingface_hub.try_to_load_from_cache(repository, name)
        is_cached = isinstance(cached, str)
        if not is_cached and constants.HF_HUB_OFFLINE:
            raise FileNotFoundError(
                f"Expected {name} of {preset} in the cache, since HF_HUB_OFFLINE is set"
            )
        if not is_cached:
            # The download would try for a minute to reach a server.
            url = huggingface_hub.hf_hub_url(repository, name)
            try:
                huggingface_hub.get_hf_file_metadata(url, timeout=_PATIENCE)
            except errors.EntryNotFoundError:
                # The download notes in the cache that there is none.
                pass
            except Exception as error:
                if cached is None:
                    raise
                raise FileNotFoundError(f"{preset} had no {name}") from error
        try:
            return huggingface_hub.hf_hub_download(repository, name)
        except RuntimeError as error:
            # All that the client of Xet's storage says.
            raise ConnectionError(error) from error


def check_storage(address: str) -> None:
    """Raises ConnectionError at once, where TensorFlow would try for minutes."""
    with named_errors(address):
        _reach_storage()


@functools.cache
def _reach_storage():
    # Once a process: later failures are for the client itself to try again. Any answer
    # will do, such as that the buckets may not be listed.
    request = urllib.request.Request(GOOGLE_STORAGE, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PATIENCE).close()
    except HTTPError as error:
        error.close()


def local(address: str) -> str:
    """Returns the local path of a `gs://` or `https://` file, downloaded once."""
    if "://" not in address:
        return address
    scheme, _, path = address.partition("://")
    if scheme not in ("gs", "http", "https") or ".." in path.split("/"):
        raise ValueError(f"Expected gs:// or https://; received: {address!r}")
    # Keras's download folder.
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    target = home / "keras_moe" / scheme / path
    if target.is_file():
        return str(target)
    url = address
    if scheme == "gs":
        check_storage(address)
        url = f"{GOOGLE_STORAGE}/{path}"
    target.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted download must not leave a file that looks complete.
    with (
        tempfile.TemporaryDirectory(prefix=".partial.", dir=target.parent) as folder,
        named_errors(address),
    ):
        try:
            file = keras.utils.get_file(
                fname=target.name, origin=url, cache_dir=folder, cache_subdir="."
            )
        except Exception as error:
            # Keras raises a plain `Exception` in place of an error of urllib.
            cause = error.__context__ or error
            if isinstance(cause, OSError) and not isinstance(cause, HTTPError):
                raise cause from None
            if isinstance(cause, HTTPError):
                cause.close()
            raise unfit(f"a file that can be downloaded from {url}", error) from error
        os.replace(file, target)
    return str(target)


@contextlib.contextmanager
def named_errors(source: str) -> Iterator[None]:
    """Context in which a hub's errors become those of this module."""
    try:
        yield
    except Exception as error:
        named = _named(error, source)
        if named is None:
            raise
        raise named from error


def _named(error, source):
    """Returns the error to raise in place of a hub's, or None for any other."""
    from huggingface_hub import constants, errors

    is_hugging_face = source.startswith("hf://")
    server, login, offline = "Kaggle", "kagglehub.login()", ""
    if is_hugging_face:
        server, login = constants.ENDPOINT, "huggingface_hub.login() or HF_TOKEN"
        offline = ". HF_HUB_OFFLINE=1 reads files that were downloaded before"
    elif "://" in source and not source.startswith("kaggle://"):
        server = urlsplit(GOOGLE_STORAGE if source[:5] == "gs://" else source).netloc
    received = f"received: {type(error).__name__}: {error}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return ValueError(f"Expected a handle like hf://USER/NAME; {received}")
    is_gated = isinstance(error, errors.GatedRepoError)
    if isinstance(error, errors.RepositoryNotFoundError) and not is_gated:
        expected = f"a repository on {server}, which if private needs {login}"
        return unfit(expected, f"{source}, which is not there ({error})")
    if is_gated or status in (401, 403):
        return PermissionError(
            f"Expected access to {source}: if its page on {server} says so, ask for "
            f"it there; then log in with {login}; {received}"
        )
    is_missing = isinstance(error, errors.EntryNotFoundError)
    if is_missing and not isinstance(error, errors.LocalEntryNotFoundError):
        return FileNotFoundError(f"Expected a file of {source}; {received}")
    is_network = type(error).__module__.partition(".")[0] in _TRANSPORTS
    # Of Python's own, neither those made here nor a closed standard output.
    if isinstance(error, (ConnectionError, TimeoutError)) and source not in str(error):
        is_network = not isinstance(error, BrokenPipeError)
    # The connection was lost after the server had answered.
    is_network |= isinstance(error, errors.LocalEntryNotFoundError)
    if is_network or isinstance(error, errors.HfHubHTTPError):
        return ConnectionError(
            f"Expected a connection to {server} for {source}; {received}{offline}"
        )
    return None
